import json
import re
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, Event
from types import SimpleNamespace

import jsonschema_rs
import llguidance
import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import Structured
from fullstride.llm.text import grammar
from fullstride.llm.text.grammar import Compiler, Matcher
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.llm.weights import load
from tests.llm.tiny import SPECIAL, make_tokenizer

TOKENIZER = Tokenizer(make_tokenizer(), eos=(2, 0)).of_model(344, (2, 0))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 3, None]}, "minItems": 1, "maxItems": 3},
        "inner": {"$ref": "#/$defs/flag"},
    },
    "required": ["name", "age", "inner"],
    "additionalProperties": False,
    "$defs": {"flag": {"anyOf": [{"type": "boolean"}, {"const": {"x": 1}}]}},
}
PEOPLE = {
    "type": "array",
    "items": {"$ref": "#/$defs/person"},
    "maxItems": 2,
    "$defs": {"person": PERSON, **PERSON["$defs"]},
}
SCHEMAS = [PERSON, {"type": "string", "pattern": "^[a-c]{2,4}é$"}, PEOPLE]
REGEXES = [r"[0-9]{1,2}\\", r"[A-Z][a-z]{1,8} (is|was)/\d{4}\.", r"(東京|👩‍🚀){1,3}", r"a{3,5}b?"]
LARK = 'start: "<" NAME ">" inner "</" NAME ">"\ninner: "x"{1,4}\nNAME: /[a-z]{1,3}/\n'


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENIZER)


def allowed(matcher: Matcher, tokenizer: Tokenizer = TOKENIZER) -> np.ndarray:
    """The ids whose bits are set."""
    mask = matcher.mask()
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-tokenizer.vocab_size // 32),)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def sample(matcher: Matcher, rng: np.random.Generator, tokenizer: Tokenizer = TOKENIZER) -> str:
    """Tokens drawn evenly among those that may come, until the text ends."""
    ids: list[int] = []
    while not ids or ids[-1] not in tokenizer.eos:
        assert len(ids) < 3000
        ids.append(int(rng.choice(allowed(matcher, tokenizer))))
        assert matcher.advance(ids[-1])
    return tokenizer.decode(ids)


@pytest.mark.parametrize("schema", SCHEMAS, ids=["person", "pattern", "people"])
def test_random_tokens_under_a_schema_are_valid(compiler, schema, seed):
    rng = np.random.default_rng(seed)
    check = jsonschema_rs.validator_for(schema)
    texts = [sample(compiler.matcher(Structured("json_schema", json.dumps(schema))), rng) for _ in range(5)]
    for text in texts:
        check.validate(json.loads(text))
    assert len(set(texts)) > 2


@pytest.mark.parametrize("regex", REGEXES)
def test_random_tokens_under_an_expression_match_it(compiler, regex, seed):
    rng = np.random.default_rng(seed)
    for _ in range(5):
        assert re.fullmatch(regex, sample(compiler.matcher(Structured("regex", regex)), rng), re.ASCII)


def test_random_tokens_under_a_grammar_follow_it(compiler, seed):
    text = sample(compiler.matcher(Structured("grammar", LARK)), np.random.default_rng(seed))
    assert re.fullmatch("<[a-z]{1,3}>x{1,4}</[a-z]{1,3}>", text)


def test_any_object(compiler):
    matcher = compiler.matcher(Structured("json_object"))
    text = '{"a": [1, {"b": null}], "c": "é"}'
    assert {TOKENIZER.decode([int(token)])[0] for token in allowed(matcher)} == {"{"}
    assert all(matcher.advance(token) for token in TOKENIZER.encode(text))
    assert matcher.done


def test_smollm2_tokens_under_a_schema(smollm2):
    tokenizer = load(smollm2).tokenizer
    compiler, rng = Compiler(tokenizer), np.random.default_rng(0)
    for _ in range(5):
        text = sample(compiler.matcher(Structured("json_schema", json.dumps(PERSON))), rng, tokenizer)
        jsonschema_rs.validator_for(PERSON).validate(json.loads(text))


def test_only_an_end_token_follows_a_complete_text(compiler):
    matcher = compiler.matcher(Structured("regex", "ab"))
    for letter in "ab":
        assert not matcher.done
        assert matcher.advance(TOKENIZER.encode(letter)[0])
    assert matcher.done
    np.testing.assert_array_equal(allowed(matcher), [0, 2])
    assert matcher.advance(2)
    assert not matcher.advance(TOKENIZER.encode("a")[0])


def test_a_text_that_may_end_or_go_on(compiler):
    matcher = compiler.matcher(Structured("regex", "a+"))
    assert matcher.advance(TOKENIZER.encode("a")[0])
    assert not matcher.done
    assert {0, 2} < set(allowed(matcher).tolist())
    assert matcher.advance(0)
    assert matcher.done


def test_a_token_that_is_not_allowed_changes_nothing(compiler):
    matcher = compiler.matcher(Structured("regex", "ab"))
    before = matcher.mask()
    for token in (TOKENIZER.encode("b")[0], 1, 2, 343):
        assert not matcher.advance(token)
    np.testing.assert_array_equal(matcher.mask(), before)
    assert matcher.advance(TOKENIZER.encode("a")[0])


def test_special_and_padding_tokens_are_no_text(compiler):
    ids = set(allowed(compiler.matcher(Structured("regex", "(.|\n){5,}"))).tolist())
    assert not ids & {0, 1, 2, *range(320, 344)}
    assert len(ids) > 200


@pytest.mark.parametrize("mark", SPECIAL)
def test_a_text_that_spells_a_mark_is_written_in_letters(compiler, mark, seed):
    rng = np.random.default_rng(seed)
    around = "".join(rng.choice(list("abcé"), 2))
    texts = [mark, f"{mark}{around}", f"{around}{mark}"]
    schemas = [{"const": texts[0]}, {"enum": texts[1:]}]
    for schema in schemas:
        text = sample(compiler.matcher(Structured("json_schema", json.dumps(schema))), rng)
        jsonschema_rs.validator_for(schema).validate(json.loads(text))
    choice = Structured("grammar", "start: " + " | ".join(map(json.dumps, texts)))
    assert sample(compiler.matcher(choice), rng) in texts


def test_matchers_of_one_grammar_go_separate_ways(compiler):
    first, second = (compiler.matcher(Structured("regex", "a(b|c)d")) for _ in range(2))
    for matcher in (first, second):
        assert matcher.advance(TOKENIZER.encode("a")[0])
    assert first.advance(TOKENIZER.encode("b")[0])
    assert not first.advance(TOKENIZER.encode("c")[0])
    assert second.advance(TOKENIZER.encode("c")[0])


def test_a_grammar_is_compiled_once_and_starts_anew(compiler, monkeypatch):
    structured = Structured("regex", "once")
    used = compiler.matcher(structured)
    assert used.advance(TOKENIZER.encode("o")[0])
    monkeypatch.setattr(compiler, "_compile", lambda structured: pytest.fail("compiled again"))
    assert compiler.matcher(structured).advance(TOKENIZER.encode("o")[0])


def test_only_the_last_grammars_are_kept(monkeypatch):
    monkeypatch.setattr(grammar, "KEPT", 2)
    compiler = Compiler(TOKENIZER)
    for letter in "abac":
        compiler.matcher(Structured("regex", letter))
    assert [structured.value for structured in compiler._made] == ["a", "c"]


def test_what_is_kept_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(grammar, "KEPT_BYTES", 10 * grammar.LEAST_BYTES)
    compiler = Compiler(TOKENIZER)
    sizes = {"a": 3, "b": 6, "c": 0, "d": 2, "e": 11}
    kept = []
    for letter, size in sizes.items():
        assert compiler.matcher(Structured("regex", letter), size * grammar.LEAST_BYTES).advance(
            TOKENIZER.encode(letter)[0]
        )
        kept.append("".join(structured.value for structured in compiler._made))
    # The least of all is what each counts for; what is too large by itself is not kept.
    assert kept == ["a", "ab", "abc", "bcd", ""]
    assert not compiler._bytes


def test_what_is_asked_for_again_is_kept_for_longer(monkeypatch):
    monkeypatch.setattr(grammar, "KEPT", 2)
    compiler = Compiler(TOKENIZER)
    compiler.matcher(Structured("regex", "a"))
    compiler.matcher(Structured("regex", "b"))
    assert compiler.keeps(Structured("regex", "a"))
    assert not compiler.keeps(Structured("regex", "c"))
    compiler.matcher(Structured("regex", "c"))
    assert [structured.value for structured in compiler._made] == ["a", "c"]


def test_a_costly_grammar_holds_up_no_other(compiler, monkeypatch):
    known, compile_ = Structured("regex", "known"), compiler._compile
    compiler.matcher(known)
    begun, go_on = Event(), Event()

    def slowly(structured):
        begun.set()
        assert go_on.wait(20)
        return compile_(structured)

    monkeypatch.setattr(compiler, "_compile", slowly)
    with ThreadPoolExecutor(2) as pool:
        try:
            slow = pool.submit(compiler.matcher, Structured("regex", "slow"))
            assert begun.wait(20)
            pool.submit(compiler.matcher, known).result(5)
        finally:
            go_on.set()
        assert slow.result().advance(TOKENIZER.encode("s")[0])


@pytest.fixture
def held(compiler, monkeypatch):
    """Holds up compiles until `go_on`, counts them, and lets the first of them fail if `fail` is set."""
    state, compile_ = SimpleNamespace(compiles=0, fail=False, go_on=Event()), compiler._compile

    def counted(structured):
        state.compiles += 1
        first = state.compiles == 1
        assert state.go_on.wait(20)
        if first and state.fail:
            raise ConfigError("the first one fails")
        return compile_(structured)

    monkeypatch.setattr(compiler, "_compile", counted)
    return state


def _ask_at_once(compiler, held, structured):
    """Eight threads that ask, all of them there before the first compile ends."""
    there = Barrier(9)

    def ask():
        there.wait(20)
        return compiler.matcher(structured)

    with ThreadPoolExecutor(8) as pool:
        try:
            asked = [pool.submit(ask) for _ in range(8)]
            there.wait(20)
            # A compile of their own would have been begun by now.
            wait(asked, 0.3)
        finally:
            held.go_on.set()
    return asked


def test_the_same_shape_asked_for_at_once_is_compiled_once(compiler, held):
    first, *others = (one.result() for one in _ask_at_once(compiler, held, Structured("regex", "at once")))
    assert held.compiles == 1
    assert first.advance(TOKENIZER.encode("a")[0])
    for other in others:  # each at the start, whatever another has read
        assert not other.advance(TOKENIZER.encode("t")[0])


def test_a_shape_whose_first_compile_fails_is_tried_again(compiler, held):
    held.fail = True
    shape = Structured("regex", "again")
    failed = [one for one in _ask_at_once(compiler, held, shape) if one.exception()]
    assert failed
    for one in failed:
        with pytest.raises(ConfigError, match="the first one fails"):
            one.result()
    assert compiler.matcher(shape).advance(TOKENIZER.encode("a")[0])
    assert held.compiles == 2


def test_whitespace_in_json_has_an_end(compiler):
    matcher = compiler.matcher(Structured("json_object"))
    space = TOKENIZER.encode(" ")[0]
    assert matcher.advance(TOKENIZER.encode("{")[0])
    assert sum(matcher.advance(space) for _ in range(100)) == 24


def test_a_grammar_that_grows_too_costly_on_the_way(monkeypatch):
    monkeypatch.setattr(grammar, "LIMITS", llguidance.LLParserLimits(max_lexer_states=30))
    matcher = Compiler(TOKENIZER).matcher(Structured("regex", "(a|b)*a(a|b){12}"))
    with pytest.raises(ConfigError, match="structured output cannot go on"):
        sample(matcher, np.random.default_rng(0))


def test_an_object_may_have_many_properties_that_may_be_left_out(compiler):
    names = [f"property{i}" for i in range(900)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    matcher = compiler.matcher(Structured("json_schema", json.dumps(schema)))
    for token in TOKENIZER.encode('{"property7": 1, "property899": 23}'):
        assert token in allowed(matcher)
        assert matcher.advance(token)
    assert set(TOKENIZER.eos) <= set(allowed(matcher))


# Of one and the same text, so that a row has three items for each of the rules.
AMBIGUOUS = "start: " + " | ".join(f"a{i}" for i in range(900)) + '\nA: "x"'
AMBIGUOUS += "".join(f"\na{i}: A | a{i} A" for i in range(900))


def test_rows_of_a_grammar_are_as_wide_as_a_schemas_only_where_that_is_asked_for(compiler):
    letter = TOKENIZER.encode("x")[0]
    matcher = compiler.matcher(Structured("grammar", AMBIGUOUS, wide=True))
    assert all(matcher.advance(letter) for _ in range(3))
    with pytest.raises(ConfigError, match="grammar is not accepted: .*2701 items; max is 2000"):
        compiler.matcher(Structured("grammar", AMBIGUOUS))


def test_a_token_that_is_too_costly_says_why(monkeypatch):
    monkeypatch.setattr(grammar, "WIDE", llguidance.LLParserLimits(max_items_in_row=50))
    schema = {"type": "array", "items": {"type": "object", "properties": {f"p{i}": {} for i in range(99)}}}
    matcher = Compiler(TOKENIZER).matcher(Structured("json_schema", json.dumps(schema)))
    assert matcher.advance(TOKENIZER.encode("[")[0])
    with pytest.raises(ConfigError, match="structured output cannot go on: .*items; max is 50") as caught:
        matcher.advance(TOKENIZER.encode("{")[0])
    assert "<state>" not in str(caught.value)


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        (Structured("json_schema", '{"type":'), "json_schema is not valid JSON"),
        (Structured("json_schema", "[1]"), "json_schema is list: expected a JSON object"),
        (Structured("json_schema", '{"type": "nothing"}'), "json_schema is not accepted: Invalid type: nothing"),
        (
            Structured("json_schema", '{"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}'),
            "Unsatisfiable schema",
        ),
        (Structured("json_schema", '{"not": {}}'), "json_schema is not accepted: no text conforms to it"),
        (Structured("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'), "Unsatisfiable schema"),
        (Structured("json_schema", "[" * 60_000), "json_schema"),
        (Structured("regex", "\\"), "regex is not accepted: it ends in a backslash; expected a character"),
        (Structured("regex", r"a\\" + "\\"), "regex is not accepted: it ends in a backslash; expected a character"),
        (Structured("regex", "(ab"), "regex is not accepted: .*unclosed group"),
        (Structured("regex", "a" * 70_000), "regex of 70000 bytes: expected at most 65536"),
        (
            Structured("json_schema", '{"items":' * 200 + "{}" + "}" * 200),
            "json_schema is not accepted: recursion limit",
        ),
        (
            Structured("grammar", "start: " + " | ".join(f'"x{i}"' for i in range(6001))),
            "grammar is not accepted: .*6002 it",
        ),
        (Structured("grammar", "start: nowhere"), "grammar is not accepted: .*unknown name"),
        (Structured("grammar", "start: start"), "grammar is not accepted: no text conforms to it"),
        (Structured("regex", r"[^\s\S]"), "regex is not accepted: no text conforms"),
        (Structured("json_schema", '{"$ref": "#"}'), "json_schema is not accepted: no text conforms"),
    ],
)
def test_what_is_refused(compiler, structured, message):
    with pytest.raises(ConfigError, match=message) as caught:
        compiler.matcher(structured)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_an_end():
    with pytest.raises(ConfigError, match="needs an end token"):
        Compiler(Tokenizer(make_tokenizer()))
