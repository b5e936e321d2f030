"""Replies that are kept to a form, by a model whose logits are random."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import threading
import weakref
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.generate.fake_model import FakeModel
from vkmoe.choices import DraftWay
from vkmoe.config import SamplingConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.generate import constraint as subject
from vkmoe.generate.constraint import Constraint, Constraints, Mask
from vkmoe.generate.loop import Generation, Request
from vkmoe.generate.scheduler import Scheduler
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.gguf_file import open_gguf
from vkmoe.llm import demo_model_path

from .conftest import nested, spm_metadata, tiny_metadata, tokenizer_of, tokens_with

REAL = ("deepseek-coder", "qwen2", "llama-spm")
THERE_SMALL = [pytest.param(n, marks=pytest.mark.shared) for n in ("deepseek-coder", "llama-spm")]
THERE_SPM = [pytest.param(n, marks=pytest.mark.shared) for n in ("llama-spm", "phi-3")]
FAST = ("tiny", "tiny-spm", "demo")
WAYS: tuple[DraftWay, ...] = ("none", "lookup")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["number", "boolean", "null"]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}
CODES = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
    "minItems": 1,
    "maxItems": 4,
}
DATED = {
    "type": "object",
    "properties": {"day": {"type": "string", "format": "date"}, "kind": {"const": "x\ny"}},
    "required": ["day", "kind"],
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "tree": TREE,
    "codes": CODES,
    "dated": DATED,
    "number": {"type": "number"},
    "text": {"type": "string", "minLength": 2, "maxLength": 5},
    "anything": True,
    "object": {"type": "object"},
}


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest, name: str) -> Tokenizer:
    return made(request, name)


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> Constraints:
    return Constraints(tokenizer)


def made(request: pytest.FixtureRequest, name: str) -> Tokenizer:
    if name == "tiny":
        return tokenizer_of(tiny_metadata())
    if name == "tiny-spm":
        words = ["{", "}", '"', "▁", "▁{", '{"', "▁▁", "name", "<think>", "▁1", "1", "<t>"]
        return tokenizer_of(spm_metadata(words))
    if name == "demo":
        path = demo_model_path()
    else:
        path = request.getfixturevalue("shared") / "vocab" / f"ggml-vocab-{name}.gguf"
    with open_gguf(path) as file:
        return Tokenizer.from_file(file)


BLANKS = b" \t\n\r"


class Reply:
    """What a fake model says that likes some characters: at first those that end things."""

    def __init__(
        self,
        constraint: Constraint,
        seed: int,
        draft: DraftWay = "none",
        habit: float = 0.0,
        max_tokens: int = 300,
        liked: bytes = b'"}],.0123456789',
        **options: Any,
    ) -> None:
        tokenizer = constraint.tokenizer
        biases = {i: 5.0 for i in range(tokenizer.n_vocab) if is_liked(tokenizer, i, liked)}
        sampling = SamplingConfig(temp=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        model = FakeModel(1, 400, habit=habit, n_vocab=tokenizer.n_vocab + 3)
        scheduler = Scheduler(model, draft)
        request = Request(
            (seed % 50, 7),
            options.pop("sampling", sampling),
            max_tokens,
            logit_bias=tuple(biases.items()),
            constraint=constraint,
            **options,
        )
        generation = Generation(request, tokenizer, model.ctx_size)
        scheduler.submit(generation)
        while scheduler.has_work:
            scheduler.step()
        assert generation.error is None, generation.error
        pieces = generation.take_pieces()
        self.text = "".join(piece.text for piece in pieces)
        self.ids = [piece.token_id for piece in pieces if piece.token_id >= 0]
        self.reason = generation.finish_reason
        self.n_drafted, self.n_accepted = generation.n_drafted, generation.n_accepted


def is_liked(tokenizer: Tokenizer, token: int, liked: bytes) -> bool:
    raw = tokenizer.token_bytes(token, False)
    return token in tokenizer.end_ids or (raw != b"" and all(byte in liked for byte in raw))


def longest_blank(text: str) -> int:
    """The characters of the longest run of blanks between the parts of a JSON text."""
    parts = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    return max(map(len, re.findall(r"\s+", parts)), default=0)


# ----- replies -----


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in FAST for kind in SCHEMAS]
    + [
        pytest.param(name, kind, marks=pytest.mark.shared)
        for name in REAL
        for kind in ("person", "tree", "codes")
    ],
    scope="module",
)
@pytest.mark.sample(6)
def test_replies_that_end_are_what_a_schema_describes(
    name: str, kind: str, constraints: Constraints
) -> None:
    constraint = constraints.json_schema(SCHEMAS[kind])
    n_ended = 0
    for seed in range(10 if name in FAST else 2):
        reply = Reply(constraint, seed)
        assert not constraint.tokenizer.special_ids.intersection(reply.ids), reply.text
        assert not reply.text.startswith((" ", "\n")), reply.text
        if reply.reason == "stop":
            n_ended += 1
            jsonschema.validate(json.loads(reply.text), SCHEMAS[kind])
        else:
            assert len(reply.ids) == 300
    assert n_ended > 0


@pytest.mark.parametrize("name", FAST, scope="module")
def test_a_model_that_likes_blanks_closes_the_objects_that_a_schema_bounds(
    constraints: Constraints,
) -> None:
    constraint, longest = constraints.json_schema(PERSON), 0
    for seed in range(10):
        reply = Reply(constraint, seed, liked=BLANKS)
        assert reply.reason == "stop", reply.text
        jsonschema.validate(json.loads(reply.text), PERSON)
        longest = max(longest, longest_blank(reply.text))
    assert longest == 1
    assert Reply(constraint, 0, liked=BLANKS, max_tokens=9).reason == "length"


OPEN = {"type": "object", "properties": {"a": {"enum": [1]}}}
PART = {"type": "object", "properties": {"b": {"enum": [2]}}}


@pytest.mark.parametrize(
    ("schema", "text", "is_taken"),
    [
        (OPEN, '{"a":1}', True),
        (OPEN, '{"a":1,"b":2}', False),
        ({**OPEN, "type": ["object", "null"]}, '{"a":1,"b":2}', False),
        ({**OPEN, "type": ["object", "null"]}, "null", True),
        ({"type": "array", "items": {"anyOf": [OPEN, {"type": "null"}]}}, '[{"b":2}]', False),
        ({**OPEN, "additionalProperties": True}, '{"a":1,"b":2}', True),
        ({**OPEN, "additionalProperties": {"type": "string"}}, '{"a":1,"b":"x"}', True),
        ({**OPEN, "required": ["b"]}, '{"a":1,"b":2}', True),
        ({**OPEN, "required": ["a"], "minProperties": 2}, '{"a":1,"b":2}', True),
        ({"allOf": [OPEN, PART]}, '{"a":1,"b":2}', True),
        ({"$ref": "#/$defs/x", "required": ["b"], "$defs": {"x": OPEN}}, '{"a":1,"b":2}', True),
        ({"$ref": "#/$defs/o", **PART, "$defs": {"o": OPEN}}, '{"a":1,"b":2}', True),
        ({"type": "object"}, '{"b":2}', True),
        ({"const": {**OPEN}}, json.dumps(OPEN, separators=(",", ":")), True),
    ],
)
def test_an_object_has_the_properties_that_its_schema_lists_and_no_others(
    tiny_tokenizer: Tokenizer, schema: Any, text: str, is_taken: bool
) -> None:
    """Unless the schema says something else, or may add up to an object with more of them."""
    state = Constraints(tiny_tokenizer).json_schema(schema).begin()
    for token in tiny_tokenizer.encode_plain(text):
        allowed = state.allowed()
        if allowed is None or not allowed[token]:
            assert not is_taken
            return
        state.accept(token)
    assert is_taken


def test_any_json_object_is_one(tiny_tokenizer: Tokenizer) -> None:
    constraint = Constraints(tiny_tokenizer).json_schema({"type": "object"})
    replies = [Reply(constraint, seed) for seed in range(6)]
    ended = [json.loads(reply.text) for reply in replies if reply.reason == "stop"]
    assert ended and all(isinstance(value, dict) for value in ended)


@pytest.mark.parametrize("name", ["tiny", "tiny-spm", *THERE_SMALL], scope="module")
def test_a_regular_expression_matches_the_whole_reply(constraints: Constraints) -> None:
    pattern = r"(é|[a-c ]){2,6}-\d+"
    for seed in range(5):
        reply = Reply(constraints.regex(pattern), seed)
        assert reply.reason == "length" or re.fullmatch(pattern, reply.text), reply.text


def test_a_reply_is_the_same_with_and_without_drafts(tiny_tokenizer: Tokenizer) -> None:
    constraint = Constraints(tiny_tokenizer).json_schema(
        {"type": "array", "items": {"enum": [0, 1, 11, "ab"]}, "minItems": 20}
    )
    n_accepted = 0
    for seed in range(10):
        plain, drafted = (Reply(constraint, seed, draft, habit=4.0) for draft in WAYS)
        assert plain.n_drafted == 0 < drafted.n_drafted
        assert (drafted.ids, drafted.text, drafted.reason) == (
            plain.ids,
            plain.text,
            plain.reason,
        )
        n_accepted += drafted.n_accepted
    assert n_accepted > 20


# ----- where replies begin and end -----


@pytest.mark.parametrize("name", ["tiny-spm", *THERE_SPM], scope="module")
def test_a_form_that_begins_without_a_blank_has_none(
    tokenizer: Tokenizer, constraints: Constraints
) -> None:
    mask = constraints.json_schema({"type": "object"}).begin().allowed()
    assert mask is not None
    first = [tokenizer.token_bytes(int(i), False) for i in np.flatnonzero(mask)]
    assert b"{" in first and all(raw.startswith(b"{") for raw in first)


def test_blanks_behind_special_tokens_are_those_of_the_grammar() -> None:
    tokenizer = tokenizer_of(spm_metadata(["▁", "▁x", "x", "<t>"]))
    assert tokenizer.adds_space
    constraints = Constraints(tokenizer)
    for blanks in ("", " ", "  "):
        grammar = f"start: {constraints.quoted(f'<t>{blanks}x')}"
        for seed in range(3):
            assert Reply(constraints.lark(grammar), seed).text == f"<t>{blanks}x"


@pytest.mark.parametrize("name", ["tiny", "demo", *THERE_SMALL], scope="module")
def test_end_tokens_are_allowed_where_the_form_may_end_and_no_other_special_ones(
    tokenizer: Tokenizer, constraints: Constraints
) -> None:
    ends, special = tokenizer.end_ids, tokenizer.special_ids
    assert ends
    state = constraints.regex(r"(.|\n)(.|\n)*").begin()
    for n_tokens in range(3):
        mask = state.allowed()
        assert mask is not None and mask.shape == (tokenizer.n_vocab,)
        allowed = set(np.flatnonzero(mask).tolist())
        assert allowed & special == (ends if n_tokens else set())
        assert len(allowed) > 0.6 * len(set(range(tokenizer.n_vocab)) - special)
        assert state.accept(tokenizer.encode_plain("a")[0])


def test_special_tokens_come_where_a_grammar_names_them(tiny_tokenizer: Tokenizer) -> None:
    constraints = Constraints(tiny_tokenizer)
    quoted = constraints.quoted('<think>"é\n\0<|im_end|>')
    assert quoted == r'<[261]> "\"\u00e9\n\u0000" <[260]>'
    assert constraints.quoted("") == '""'
    for grammar in (
        'start: <think> /[a-c]{3}/ <think> "\\u00e9"',
        "start: <[261]> /[ab]{3}/ <[261]>",
    ):
        reply = Reply(constraints.lark(grammar), 1)
        assert re.fullmatch("<think>[abc]{3}<think>é?", reply.text), reply.text
        assert reply.ids.count(261) == 2 and reply.reason == "stop"
    spelled = Reply(constraints.regex("<think>"), 1)
    assert spelled.text == "<think>" and 261 not in spelled.ids


def test_text_that_must_come_has_the_tokens_that_the_model_knows_it_by(
    tiny_tokenizer: Tokenizer,
) -> None:
    for text in ("hello hell", "he said hell"):
        reply = Reply(Constraints(tiny_tokenizer).json_schema({"const": text}), 1)
        assert reply.text == f'"{text}"'
        assert reply.ids == tiny_tokenizer.encode_plain(reply.text)


def test_a_schema_may_be_a_part_of_a_grammar(tiny_tokenizer: Tokenizer) -> None:
    constraints = Constraints(tiny_tokenizer)
    rule = constraints.json_in_lark(PERSON | {"not": {}}, lenient=True)
    begin, end = constraints.quoted("<think>call "), constraints.quoted("</x>")
    for seed in range(4):
        reply = Reply(constraints.lark(f"start: {begin} arguments {end}\narguments: {rule}"), seed)
        assert reply.reason == "stop" and reply.ids[0] == 261
        value = reply.text.removeprefix("<think>call ").removesuffix("</x>")
        jsonschema.validate(json.loads(value), PERSON)
        assert longest_blank(value) <= 1
    with pytest.raises(UsageError, match="nested"):
        constraints.json_in_lark(nested(200))


def test_a_form_that_has_ended_ends_the_reply_without_another_step(
    tiny_tokenizer: Tokenizer,
) -> None:
    constraints = Constraints(tiny_tokenizer)
    for pattern, text in (("abc", "abc"), ("", "")):
        for ignore_eos in (False, True):
            reply = Reply(constraints.regex(pattern), 3, ignore_eos=ignore_eos)
            assert (reply.text, reply.reason) == (text, "stop")
            assert len(reply.ids) == len(text), "it has no end token"
    assert Reply(constraints.regex("abc"), 3, max_tokens=2).reason == "length"
    assert Reply(constraints.regex("abc"), 3, stop=("b",)).text == "a"
    endless = Reply(constraints.regex("a*"), 3, ignore_eos=True, max_tokens=9)
    assert (endless.text, endless.reason) == ("a" * 9, "length")


def test_a_vocabulary_without_end_tokens_has_forms_that_end() -> None:
    metadata = tiny_metadata(
        tokens=tokens_with(_259="<x>", _260="<y>"), bos_token_id=None, eos_token_id=None
    )
    tokenizer = tokenizer_of(metadata)
    assert not tokenizer.end_ids
    constraint = Constraints(tokenizer).json_schema(PERSON)
    reply = Reply(constraint, 1)
    assert reply.reason == "stop"
    jsonschema.validate(json.loads(reply.text), PERSON)


# ----- threads -----


def test_masks_are_the_same_on_every_thread(tiny_tokenizer: Tokenizer) -> None:
    constraint = Constraints(tiny_tokenizer).json_schema(TREE)
    paths = [Reply(constraint, seed).ids for seed in range(6)]
    plain = [list(masks_here(constraint, path)) for path in paths]
    found: dict[int, list[Mask | None]] = {}

    def follow(index: int) -> None:
        state = constraint.begin()
        masks = [state.allowed()]
        for token in paths[index % 6]:
            masks.append(state.allowed() if state.accept(token) else None)
        found[index] = masks

    threads = [threading.Thread(target=follow, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(12):
        wanted = plain[index % 6]
        assert len(found[index]) == len(wanted) > 3
        for mask, right in zip(found[index], wanted, strict=True):
            assert (mask is None and not right[:259].any()) or np.array_equal(mask, right)  # type: ignore[arg-type]


def masks_here(constraint: Constraint, path: list[int]) -> Any:
    """The masks along a path, computed by this thread."""
    matcher = constraint._matcher.deep_copy()
    yield subject._mask(matcher, constraint.tokenizer.n_vocab)
    for token in path:
        assert matcher.consume_token(token)
        yield subject._mask(matcher, constraint.tokenizer.n_vocab)


def test_masks_are_computed_while_the_model_runs(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = Constraints(tiny_tokenizer).regex("[a-c]{4}")
    compute, may_go_on, names = subject._mask, threading.Event(), []

    def slowly(*args: Any) -> Mask:
        assert may_go_on.wait(30)
        names.append(threading.current_thread().name)
        return compute(*args)

    monkeypatch.setattr(subject, "_mask", slowly)
    state = constraint.begin()
    assert state.accept(ord("a")), "comes back before the mask is there"
    may_go_on.set()
    assert state.allowed() is not None
    assert [name.startswith("vkmoe-constraint") for name in names] == [True]


def test_a_form_that_takes_too_long_ends_its_reply(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = Constraints(tiny_tokenizer).regex("[a-c]{4}")
    compute, may_end = subject._mask, threading.Event()
    monkeypatch.setattr(subject, "_mask", lambda *args: (may_end.wait(30), compute(*args))[1])
    monkeypatch.setattr(subject, "_MAX_SECONDS", 0.01)
    state = constraint.begin()
    assert state.accept(ord("a"))
    with pytest.raises(VkmoeError, match="took more than"):
        state.allowed()
    state.close()
    may_end.set()


def test_cancelled_replies_leave_nothing(tiny_tokenizer: Tokenizer) -> None:
    constraint = Constraints(tiny_tokenizer).json_schema({"type": "object"})
    states: list[weakref.ref[Any]] = []
    for when in range(4):
        model = FakeModel(1)
        scheduler = Scheduler(model)
        generation = Generation(Request((1, 2), constraint=constraint), tiny_tokenizer, 64)
        states.append(weakref.ref(generation._form))
        scheduler.submit(generation)
        for _ in range(when):
            scheduler.step()
        generation.cancel()
        scheduler.sweep()
        assert not scheduler.has_work
    gc.collect()
    assert [state() for state in states] == [None] * 4
    n_threads = sum(each.name.startswith("vkmoe-constraint") for each in threading.enumerate())
    assert n_threads <= 4


# ----- what is refused -----


def test_what_cannot_be_kept_to_is_ignored_where_that_is_asked_for(
    tiny_tokenizer: Tokenizer,
) -> None:
    constraints = Constraints(tiny_tokenizer)
    part = {"type": "string", "maxLength": 4, "x-guidance": {"lenient": True}}
    overlapping = [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]
    for more in ({"format": "password"}, {"not": {"const": "abc"}}, {"oneOf": overlapping}):
        schema: dict[str, Any] = {"x-guidance": {"lenient": True}, **more}
        if "oneOf" not in more:
            schema |= part
        with pytest.raises(UsageError):
            constraints.json_schema(schema)
        rule = constraints.json_in_lark(schema, lenient=True)
        reply = Reply(constraints.lark(f"start: {rule}"), 1)
        kind = int if "oneOf" in more else str
        assert reply.reason == "stop" and isinstance(json.loads(reply.text), kind)


def test_text_that_the_vocabulary_cannot_spell_is_an_error_of_the_reply() -> None:
    tokenizer = tokenizer_of(tiny_metadata(tokens=tokens_with(_195="QQ")))  # byte 0xC3
    constraint = Constraints(tokenizer).json_schema({"enum": ["aé", "bbb"]})
    texts = set()
    for seed in range(8):
        try:
            texts.add(Reply(constraint, seed).text)
        except AssertionError as error:
            assert "cannot be kept to the form" in str(error)
    assert texts <= {'"bbb"'} and texts


def test_without_the_package_an_error_says_what_to_install(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(VkmoeError, match="not installed") as found:
        Constraints(tiny_tokenizer).json_schema({"type": "object"})
    assert "vkmoe[server]" in found.value.hint


def test_the_package_is_imported_only_when_needed() -> None:
    program = "import sys, vkmoe.llm; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
