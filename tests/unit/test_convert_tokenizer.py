"""tokenizer.json from GGUF fields: what is refused, what the merges leave out, and that the output is stable."""

import json

import pytest
from tokenizers import Tokenizer

from skerry.errors import ModelError
from tools.convert.tokenizer import TokenType, merges_from_scores, tokenizer_from_gguf

BYTE_LEVEL: dict[str, object] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "ab", "1", "11", "Ġ", "<tool>"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["a b", "1 1"],
}
SCORED: dict[str, object] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "▁", "a", "b", "ab", "▁ab", "<", "s", ">", "<s", *"é", "<0x41>"],
    "tokenizer.ggml.scores": [0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -9.0, -9.0, -9.0, -3.0, -9.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, *[1] * 10, 6],
}


def built(fields: dict[str, object], **changes: object) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_from_gguf({**fields, **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}}))


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["1", "1", "ab"]), ("gpt-2", ["11", "ab"])])
def test_pre_tokenizer_decides_what_may_merge(pre: str, tokens: list[str]) -> None:
    assert built(BYTE_LEVEL, pre=pre).encode("11ab").tokens == tokens


def test_token_types() -> None:
    added = built(BYTE_LEVEL).get_added_tokens_decoder()
    assert {i: (token.content, token.special) for i, token in added.items()} == {
        0: ("<|end|>", True),
        7: ("<tool>", False),
    }


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"pre": "other-bpe"}, "'other-bpe' is not supported"),
        ({"merges": None}, "merges is missing"),
        ({"tokens": ["a", "a"]}, "several ids"),
    ],
)
def test_unusable_fields(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        built(BYTE_LEVEL, **changes)


def test_merges_rank_by_score_and_never_make_a_control_token() -> None:
    tokens, scores = SCORED["tokenizer.ggml.tokens"], SCORED["tokenizer.ggml.scores"]
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    types = [TokenType.UNKNOWN, TokenType.CONTROL, *[TokenType.NORMAL] * 10, TokenType.BYTE]
    assert merges_from_scores(tokens, scores, types) == [("a", "b"), ("▁", "ab"), ("<", "s")]


def test_space_prefix() -> None:
    assert built(SCORED).encode("ab").tokens == ["▁ab"]
    assert built(SCORED).decode([6]) == "ab"
    without = built(SCORED, add_space_prefix=False)
    assert without.encode("ab").tokens == ["ab"]
    assert without.decode([6]) == " ab"


@pytest.mark.parametrize("fields", [BYTE_LEVEL, SCORED])
def test_same_fields_same_bytes(fields: dict[str, object]) -> None:
    text = tokenizer_from_gguf(fields)
    assert text == tokenizer_from_gguf(dict(reversed(fields.items())))
    assert json.loads(text)["model"]["type"] == "BPE"
