"""Requests with tools, and the outcome that is right for each: the data of `benchmarks.tool_calls`.

The even requests of each class are for development: prompts and thresholds may be chosen with them. The odd ones are
held out. A change that was chosen by looking at them makes their figures worthless.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Tool = dict[str, Any]

TEXT: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}


class OneOf:
    """Several right values of an argument."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class Exactly:
    """A text that must be copied character by character. Other texts are compared without case and final dots."""

    def __init__(self, value: str) -> None:
        self.value = value


class Case(NamedTuple):
    """A request and its right outcome.

    `tool` is the tool to call, or empty if the model should answer with text. `values` are the arguments that count;
    others only have to be valid. `mentions` is a text that the answer should contain.
    """

    name: str
    kind: str
    input: str | Sequence[Mapping[str, Any]]
    tools: Sequence[Tool]
    tool: str = ""
    values: Mapping[str, Any] = {}
    mentions: str = ""
    is_streamed: bool = False
    is_held_out: bool = False


def function(tool_name: str, description: str, /, *, optional: Sequence[str] = (), **properties: Any) -> Tool:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }
    return {"type": "function", "name": tool_name, "description": description, "parameters": parameters}


def describe(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


# The request of the official Open Responses suite, with its exact texts.
OFFICIAL: Tool = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": describe(TEXT, "The city and state, e.g. San Francisco, CA")},
        "required": ["location"],
    },
}
WEATHER = function("get_weather", "Get the current weather for a city", city=TEXT)
TIME = function("get_time", "Get the current local time in a city", city=TEXT)
STOCK = function("get_stock_price", "Get the latest price of a stock", symbol=describe(TEXT, "Ticker, e.g. AAPL"))
SUM = function("add_numbers", "Add two numbers", a=NUMBER, b=NUMBER)
CURRENCY = function("convert_currency", "Convert an amount of money", amount=NUMBER, source=TEXT, target=TEXT)
SEARCH = function("search_web", "Search the web for current information", query=TEXT)
READ = function("read_file", "Read a file and return its contents", path=TEXT)
REMIND = function("create_reminder", "Create a reminder", text=TEXT, date=describe(TEXT, "YYYY-MM-DD"))
EMAIL = function("send_email", "Send an e-mail", to=TEXT, subject=TEXT, body=TEXT)
TIMER = function("set_timer", "Start a timer", minutes=INTEGER)
ORDER = function("get_order", "Look up the status of an order", order_id=TEXT)
FLIGHT = function("get_flight_status", "Get the status of a flight", flight=TEXT)
PLAY = function("play_music", "Play music by an artist", artist=TEXT)
TRANSLATE = function("translate_text", "Translate a text", text=TEXT, language=TEXT)
CONTACT = function("add_contact", "Save a contact", name=TEXT, phone=TEXT)
NOTE = function("save_note", "Save a note with exactly the given text", text=TEXT)
DELETE = function("delete_file", "Delete a file", path=TEXT)
LIGHTS = function("set_lights", "Switch the lights of a room", room=TEXT, state={"enum": ["on", "off"]})
THERMOSTAT = function("set_temperature", "Set the temperature of the heating", degrees=NUMBER)
DOCS = function("search_documents", "Search the company's internal documents", query=TEXT)
USERS = function("list_users", "List all users of this server")
RUN_SQL = function("run_sql", "Run an SQL query on the sales database", query=TEXT)
TICKET = function(
    "create_ticket", "Create a support ticket", title=TEXT, priority={"enum": ["low", "normal", "high", "urgent"]}
)
BOOK = function("book_table", "Book a table in a restaurant", restaurant=TEXT, people=INTEGER, time=TEXT)
EVENT = function(
    "create_event",
    "Create a calendar event",
    title=TEXT,
    start=record(date=describe(TEXT, "YYYY-MM-DD"), time=describe(TEXT, "HH:MM")),
    attendees=array(TEXT),
)
SHOP = function(
    "place_order",
    "Place an order in the shop",
    items=array(record(product=TEXT, quantity=INTEGER)),
    address=record(street=TEXT, city=TEXT, zip=TEXT),
)
USER = function("create_user", "Create a user account", user=record(name=TEXT, email=TEXT, roles=array(TEXT)))
CONFIGURE = function(
    "update_settings", "Update the settings of a server", server=TEXT, settings=record(port=INTEGER, debug=BOOLEAN)
)
UNITS = function(
    "get_forecast",
    "Get the weather forecast for a city",
    optional=("unit",),
    city=TEXT,
    unit={"enum": ["celsius", "fahrenheit"]},
)
SHIRT = function(
    "order_shirt", "Order a shirt", color={"enum": ["red", "green", "blue", "black"]}, size={"enum": ["S", "M", "L"]}
)
VOLUME = function("set_volume", "Change the volume", direction={"enum": ["up", "down", "mute"]})
ROUTE = function(
    "get_route", "Find a route", origin=TEXT, destination=TEXT, mode={"enum": ["walking", "cycling", "driving"]}
)
STATUS = function("set_status", "Set the user's status", status={"enum": ["available", "busy", "away", "offline"]})

OFFICE = [EMAIL, REMIND, EVENT, DOCS, CONTACT]
HOME = [LIGHTS, THERMOSTAT, TIMER, PLAY, VOLUME]
TRAVEL = [WEATHER, TIME, CURRENCY, FLIGHT, BOOK]
FILES = [READ, DELETE, SEARCH, RUN_SQL]

Row = tuple[Any, ...]

# Input, tools, tool to call, right values.
NEEDED: tuple[Row, ...] = (
    ("What is the weather in Paris right now?", [WEATHER], "get_weather", {"city": "Paris"}),
    ("How warm is it in Oslo today?", [WEATHER], "get_weather", {"city": "Oslo"}),
    ("What's the current price of TSLA?", [STOCK], "get_stock_price", {"symbol": "TSLA"}),
    ("How much is Nvidia stock (NVDA) trading at?", [STOCK], "get_stock_price", {"symbol": "NVDA"}),
    ("Set a timer for 25 minutes.", [TIMER], "set_timer", {"minutes": 25}),
    ("Please start a 7 minute timer for my tea.", [TIMER], "set_timer", {"minutes": 7}),
    ("Where is my order A-1099?", [ORDER], "get_order", {"order_id": "A-1099"}),
    ("Has order 55821 been shipped yet?", [ORDER], "get_order", {"order_id": "55821"}),
    ("What time is it in Nairobi?", [TIME], "get_time", {"city": "Nairobi"}),
    ("I need the local time in Lima.", [TIME], "get_time", {"city": "Lima"}),
    ("Is flight LH454 delayed?", [FLIGHT], "get_flight_status", {"flight": "LH454"}),
    ("Put on some music by Miles Davis.", [PLAY], "play_music", {"artist": "Miles Davis"}),
)
# Input, tools.
NOT_NEEDED: tuple[Row, ...] = (
    ("Hi there!", [WEATHER]),
    ("Hello, how are you doing today?", [STOCK]),
    ("Thank you, that was very helpful!", TRAVEL),
    ("Thanks, bye!", [TIMER]),
    ("Who wrote Romeo and Juliet?", [WEATHER]),
    ("What is the capital of Italy?", [TIMER]),
    ("Write a two-line poem about the sea.", [EMAIL]),
    ("Tell me a short joke about cats.", [ORDER]),
    ("Explain in one sentence why the sky is blue.", [READ, DELETE]),
    ("What does the word 'benevolent' mean?", [WEATHER, TIME]),
    ("What can you help me with?", HOME),
    ("Are you a human or a computer program?", OFFICE),
    ("My name is Sam and I like hiking.", [WEATHER, STOCK]),
    ("I am a bit tired this morning.", [PLAY, TIMER]),
    ("How many legs does a spider have?", FILES),
    ("Name three fruits that are yellow.", TRAVEL),
    ('Answer with this JSON and nothing else: {"name": "Ann", "age": 30}', [CONTACT]),
    ("Give me a small JSON object with the keys city and country.", [WEATHER]),
)
CHOICE: tuple[Row, ...] = (
    ("What's the weather in Madrid?", TRAVEL, "get_weather", {"city": "Madrid"}),
    ("How much is 250 US dollars in euros?", TRAVEL, "convert_currency", {"amount": 250}),
    ("Is flight BA117 on time?", TRAVEL, "get_flight_status", {"flight": "BA117"}),
    ("Tell me the time in Sydney.", TRAVEL, "get_time", {"city": "Sydney"}),
    ("Turn the lights off in the bedroom.", HOME, "set_lights", {"room": "bedroom", "state": "off"}),
    ("Set the heating to 21 degrees.", HOME, "set_temperature", {"degrees": 21}),
    ("Play something by Nina Simone.", HOME, "play_music", {"artist": "Nina Simone"}),
    ("Wake me in 30 minutes with a timer.", HOME, "set_timer", {"minutes": 30}),
    ("Show me what is in notes/todo.txt.", FILES, "read_file", {"path": "notes/todo.txt"}),
    ("Delete the file old.log.", FILES, "delete_file", {"path": "old.log"}),
    ("Find our vacation policy in the company documents.", OFFICE, "search_documents", {}),
    ("Search the web for today's news about SpaceX.", FILES, "search_web", {}),
)
COPIED: tuple[Row, ...] = (
    ("Save Zoë Müller with the number +49 170 5551234.", [CONTACT], "add_contact",
     {"name": Exactly("Zoë Müller"), "phone": Exactly("+49 170 5551234")}),
    ("Add José Peña, 555-0147, to my contacts.", [CONTACT], "add_contact",
     {"name": Exactly("José Peña"), "phone": Exactly("555-0147")}),
    ('Save this note: She said "never again" twice.', [NOTE], "save_note",
     {"text": OneOf('She said "never again" twice.', 'She said "never again" twice')}),
    ("Save the note: C:\\temp\\new is full", [NOTE], "save_note", {"text": "C:\\temp\\new is full"}),
    ("Remind me on 2026-03-09 to call the dentist.", [REMIND], "create_reminder", {"date": Exactly("2026-03-09")}),
    ("Create a reminder for 2027-12-24: buy candles.", [REMIND], "create_reminder",
     {"date": Exactly("2027-12-24"), "text": "buy candles"}),
    ("What is 48.75 plus 1903.2? Use the tool.", [SUM], "add_numbers", {"a": 48.75, "b": 1903.2}),
    ("Add 730284 and 19555.", [SUM], "add_numbers", {"a": 730284, "b": 19555}),
    ("Look up order ZX-77-0031-b.", [ORDER], "get_order", {"order_id": Exactly("ZX-77-0031-b")}),
    ("Read the file /var/log/app/2025-11-02.err", [READ], "read_file",
     {"path": Exactly("/var/log/app/2025-11-02.err")}),
    ("Translate 'お元気ですか' into English.", [TRANSLATE], "translate_text",
     {"text": Exactly("お元気ですか"), "language": "English"}),
    ("Translate 'Příliš žluťoučký kůň' to German.", [TRANSLATE], "translate_text",
     {"text": Exactly("Příliš žluťoučký kůň"), "language": "German"}),
)  # fmt: skip
NESTED: tuple[Row, ...] = (
    ("Create the event Budget review on 2026-05-04 at 14:30 with Ann and Bob.", [EVENT], "create_event",
     {"title": "Budget review", "start": {"date": "2026-05-04", "time": "14:30"}, "attendees": ["Ann", "Bob"]}),
    ("Put Lunch with Mia on my calendar for 2026-08-19 at 12:15. Attendees: Mia.", [EVENT], "create_event",
     {"start": {"date": "2026-08-19", "time": "12:15"}, "attendees": ["Mia"]}),
    ("Order 3 pencils and 2 notebooks to 12 Hill Road, Leeds, LS1 4AB.", [SHOP], "place_order",
     {"items": [{"product": OneOf("pencils", "pencil"), "quantity": 3},
                {"product": OneOf("notebooks", "notebook"), "quantity": 2}],
      "address": {"street": "12 Hill Road", "city": "Leeds", "zip": "LS1 4AB"}}),
    ("Please order 5 mugs to 4 Elm Street, Dover, 19901.", [SHOP], "place_order",
     {"items": [{"product": OneOf("mugs", "mug"), "quantity": 5}],
      "address": {"street": "4 Elm Street", "city": "Dover", "zip": "19901"}}),
    ("Create an account for Eva Lind (eva@example.com) with the roles editor and admin.", [USER], "create_user",
     {"user": {"name": "Eva Lind", "email": "eva@example.com", "roles": ["editor", "admin"]}}),
    ("Set the port of server web1 to 9090 and switch debug on.", [CONFIGURE], "update_settings",
     {"server": "web1", "settings": {"port": 9090, "debug": True}}),
)  # fmt: skip
ENUMS: tuple[Row, ...] = (
    ("Order a blue shirt in size L.", [SHIRT], "order_shirt", {"color": "blue", "size": "L"}),
    ("I'd like the black shirt, small, please order it.", [SHIRT], "order_shirt", {"color": "black", "size": "S"}),
    ("Open a ticket: the website is down, this is urgent.", [TICKET], "create_ticket", {"priority": "urgent"}),
    ("Create a low priority ticket to fix a typo.", [TICKET], "create_ticket", {"priority": "low"}),
    ("Get me the forecast for Chicago in fahrenheit.", [UNITS], "get_forecast",
     {"city": "Chicago", "unit": "fahrenheit"}),
    ("How do I cycle from Bonn to Cologne? Find a route.", [ROUTE], "get_route",
     {"origin": "Bonn", "destination": "Cologne", "mode": "cycling"}),
    ("Make it louder.", [VOLUME], "set_volume", {"direction": "up"}),
    ("Set my status to busy.", [STATUS], "set_status", {"status": "busy"}),
)  # fmt: skip
# Question, tools, tool that was called, its arguments, its result, a text that the answer should contain.
RESULTS: tuple[Row, ...] = (
    ("What is the weather in Rome?", [WEATHER], "get_weather", '{"city": "Rome"}', "sunny, 27 C", "27"),
    ("How warm is it in Kyiv?", TRAVEL, "get_weather", '{"city": "Kyiv"}', '{"temp_c": 4, "sky": "cloudy"}', "4"),
    ("Where is my order 7731?", [ORDER], "get_order", '{"order_id": "7731"}', "shipped on Monday", "Monday"),
    ("Status of order B12?", [ORDER], "get_order", '{"order_id": "B12"}', '{"status": "cancelled"}', "cancel"),
    ("What does AAPL cost?", [STOCK], "get_stock_price", '{"symbol": "AAPL"}', "231.50 USD", "231"),
    ("What time is it in Tokyo?", TRAVEL, "get_time", '{"city": "Tokyo"}', "18:42", "18:42"),
    ("Add 12 and 30.", [SUM], "add_numbers", '{"a": 12, "b": 30}', "42", "42"),
    ("Turn on the kitchen lights.", HOME, "set_lights", '{"room": "kitchen", "state": "on"}', "ok", ""),
    ("Is flight KL605 on time?", [FLIGHT], "get_flight_status", '{"flight": "KL605"}', "delayed by 40 minutes", "40"),
    ("Delete tmp.txt.", FILES, "delete_file", '{"path": "tmp.txt"}', "Error: no such file", ""),
)
OFFICIAL_QUESTION = "What's the weather like in San Francisco?"


def _build_history(row: Row) -> list[dict[str, Any]]:
    question, _, name, arguments, output, _ = row
    return [
        {"type": "message", "role": "user", "content": question},
        {"type": "function_call", "call_id": "call_1", "name": name, "arguments": arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": output},
    ]


def _build_cases() -> list[Case]:
    calls = {"needed": NEEDED, "choice": CHOICE, "copied": COPIED, "nested": NESTED, "enum": ENUMS}
    cases = [Case("", kind, row[0], row[1], row[2], row[3]) for kind, rows in calls.items() for row in rows]
    cases += [Case("", "no tool", row[0], row[1]) for row in NOT_NEEDED]
    cases += [Case("", "result", _build_history(row), row[1], mentions=row[5]) for row in RESULTS]
    location = {"location": OneOf("San Francisco, CA", "San Francisco")}
    question = [{"type": "message", "role": "user", "content": OFFICIAL_QUESTION}]
    cases += [Case("", "official", question, [OFFICIAL], "get_weather", location)] * 2
    numbers: dict[str, int] = {}
    finished = []
    for case in cases:
        number = numbers[case.kind] = numbers.get(case.kind, -1) + 1
        streamed = number // 2 % 2 == 1 if case.kind != "official" else number % 2 == 1
        name = f"{case.kind} {number}"
        finished.append(case._replace(name=name, is_streamed=streamed, is_held_out=number % 2 == 1))
    return finished


CASES = _build_cases()
