-- The sessions of agents. Times of leases are those of the database's clock.
CREATE TABLE agent_sessions (
    session_id text COLLATE "C" PRIMARY KEY,
    owner text NOT NULL DEFAULT '',
    leased_until double precision NOT NULL DEFAULT 0,
    active_at double precision NOT NULL
);

CREATE TABLE agent_session_items (
    session_id text COLLATE "C" NOT NULL,
    run_number bigint NOT NULL,
    number bigint NOT NULL,
    run_id text NOT NULL,
    item bytea NOT NULL,
    PRIMARY KEY (session_id, run_number, number)
);
