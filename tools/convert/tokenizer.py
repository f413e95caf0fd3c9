"""A Hugging Face `tokenizer.json` from the `tokenizer.ggml.*` fields of a GGUF.

The result splits text as llama.cpp does (src/llama-vocab.cpp), with one difference on purpose: no merge makes a control
token, so ordinary text that spells one stays text.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from skerry.errors import ModelError

# How text is cut before BPE, by the name in `tokenizer.ggml.pre` (as src/llama-vocab.cpp): each expression cuts further
# what those before it left.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (_TIKTOKEN % "{1,3}",)),
    "qwen2": (_TIKTOKEN % "",),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")  # a word of the vocabulary needs no merges
_COMPOSED = ("qwen2",)  # its own tokenizer applies NFC, which a GGUF does not tell


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type` (gguf's TokenType; llama.h's llama_token_type)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(fields: Mapping[str, object]) -> str:
    """The text of `tokenizer.json` for a GGUF's metadata; the same bytes for the same fields.

    `fields`: field name -> str, bool, int or list, with at least `tokenizer.ggml.model`, `.tokens` and, of `gpt2`,
    `.merges`, of `llama`, `.scores` and `.token_type`. The result holds no rule for BOS: whoever encodes knows it.

    Raises ModelError when a field is missing, or the model or pre-tokenizer is not a known one.
    """
    tokens: list[str] = _field(fields, "tokens")
    types: list[int] = _field(fields, "token_type", [TokenType.NORMAL] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens: the same token has several ids", "convert from the original model")
    kind: str = _field(fields, "model")
    if kind == "gpt2":
        tokenizer = _byte_level(fields, vocab)
    elif kind == "llama":
        tokenizer = _sentencepiece(fields, vocab, types)
    else:
        raise ModelError(f"tokenizer.ggml.model: {kind!r} is not supported", "gpt2 and llama are")
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=of_type in special, normalized=False)
            for token, of_type in zip(tokens, types, strict=True)
            if of_type in special or of_type == TokenType.USER_DEFINED
        ]
    )
    return str(tokenizer.to_str())


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary, which stores scores only (Kudo and Richardson 2018).

    SentencePiece joins the neighbours whose joint piece scores best; so each way to cut a piece into two others is a
    merge, and they rank by the score of the joint piece. Control, byte and user-defined tokens take no part: text that
    spells one is not it.
    """
    normal = {token: score for token, score, t in zip(tokens, scores, types, strict=True) if t == TokenType.NORMAL}
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=normal.__getitem__, reverse=True)  # stable: of equal scores the lower id
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]


def _byte_level(fields: Mapping[str, object], vocab: dict[str, int]) -> Tokenizer:
    name: str = _field(fields, "pre", "default")
    if name not in _SPLITS:
        raise ModelError(f"tokenizer.ggml.pre: {name!r} is not supported", f"known are {', '.join(sorted(_SPLITS))}")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(fields, "merges")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=name in _WHOLE_WORDS_FIRST))
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[name]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, object], vocab: dict[str, int], types: list[int]) -> Tokenizer:
    tokens = list(vocab)
    merges = merges_from_scores(tokens, _field(fields, "scores"), types)
    unknown = tokens[_field(fields, "unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed: bool = _field(fields, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefixed else [spaces])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _field(fields: Mapping[str, object], name: str, default: object = None) -> Any:
    value = fields.get(f"tokenizer.ggml.{name}", default)
    if value is None:
        raise ModelError(f"tokenizer.ggml.{name} is missing from the GGUF", "convert from the original model")
    return value
