"""Text <-> token ids: the tokenizer, the chat template, the incremental detokeniser, stop strings. Knows no tensors.

What a user types never becomes a special token. Tokenizers look for special tokens in the raw text, before they
normalise it. So a mark is put inside every special token that a message spells, and the first normaliser takes the
mark away again: by then the special tokens have been found, and the rest is ordinary text, character for character,
encoded as if in one piece. The mark is two Unicode noncharacters, which are for a program's own use (Unicode Standard,
section 23.7); a text that holds this very pair loses it.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, models, normalizers

from skerry.core import Message
from skerry.errors import ModelError, RequestError

_MARK = "\ufdd0\ufdd1"
_CACHED_WORDS = 256
_TEMPLATE_STEPS = 2_000_000  # Python lines and calls; a thousand messages take some 100,000


class Text:
    """The text side of one model folder: `tokenizer.json` and, unless it is a base model, `chat_template.jinja`.

    `end_ids` are the tokens that end an answer. `bos_id` begins a prompt when `add_bos`, and is what the template's
    `bos_token` stands for. Not for several threads at once.

    Raises ModelError when a file is missing or broken, or the tokenizer is of a kind that cannot be streamed.
    """

    def __init__(self, folder: Path, end_ids: Sequence[int], bos_id: int | None = None, add_bos: bool = False) -> None:
        self.end_ids = frozenset(end_ids)
        self._bos = [bos_id] if add_bos and bos_id is not None else []
        self._tokenizer = _open_tokenizer(folder / "tokenizer.json")
        own = self._tokenizer.get_added_tokens_decoder()
        borders = self.end_ids | {bos_id}
        self._special_ids = frozenset(
            i for i, token in own.items() if token.special or (i in borders and not token.content.isspace())
        )
        if short := [own[i].content for i in self._special_ids if len(own[i].content) < 2]:
            raise ModelError(f"tokenizer.json: special tokens of one character: {short}", "text could not hold it")
        # Made anew so that each is matched in the raw text, also when the file calls it normalised or not special.
        special = [_special(own[i]) for i in sorted(self._special_ids)]
        self._tokenizer.add_special_tokens(special)
        unmark = normalizers.Replace(_MARK, "")
        normalizer = self._tokenizer.normalizer
        self._tokenizer.normalizer = normalizers.Sequence([unmark, normalizer] if normalizer else [unmark])
        self._finder = Tokenizer(
            models.BPE(cache_capacity=0)
        )  # an empty vocabulary: its encodings hold the special tokens only
        self._finder.add_special_tokens(special)
        self._spelled = "\0".join(["", *(token.content for token in special), ""])
        self._longest = max((len(token.content) for token in special), default=0)
        self._byte_level, self._strip = _decoder_kind(self._tokenizer)
        self._template = _open_template(folder / "chat_template.jinja")
        self._names = {
            "bos_token": (bos_id is not None and self._tokenizer.id_to_token(bos_id)) or "",
            "eos_token": (end_ids and self._tokenizer.id_to_token(end_ids[0])) or "",
        }

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation, up to where the assistant's next answer begins.

        Without a template: the contents, one per line. Raises RequestError when a content is not Unicode text, the
        prompt is empty or the template refuses it; ModelError when the template itself is at fault.
        """
        if not messages:
            raise RequestError("a request without messages", "send at least one")
        for message in messages:
            _require_unicode(message.content)
        contents = [self._shield(message.content) for message in messages]
        if self._template is None:
            prompt = "\n".join(contents)
        else:
            chat = [{"role": str(m.role), "content": c} for m, c in zip(messages, contents, strict=True)]
            prompt = _render(self._template, messages=chat, **self._names)
        ids = self._encode(prompt)
        if not ids:
            raise RequestError("the prompt is empty", "send a message with some text")
        return ids if ids[:1] == self._bos else self._bos + ids

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text` alone, without template and BOS; `special`: special tokens in it count as such.

        Raises RequestError when it is not Unicode text (lone surrogates).
        """
        _require_unicode(text)
        return self._encode(text if special else self._shield(text))

    def detokenizer(self) -> "Detokenizer":
        """A detokeniser for one answer."""
        return Detokenizer(self._bytes, self._strip)

    def _encode(self, marked: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(marked, add_special_tokens=False).ids
        # Merges that spell a special token would make one of ordinary text: rather no answer than that.
        if sum(map(self._special_ids.__contains__, ids)) != len(self._finder.encode(marked).ids):
            raise RequestError("the text would become a special token of the model", "leave out its <...> markers")
        return ids

    def _shield(self, text: str) -> str:
        """`text` with a mark within every special token, and at an end that could complete one begun outside.

        The marks at the ends stand within white space, so that a template's `trim` works; nearly all texts need none.
        """
        # Again, for those that overlap one just marked.
        while (found := self._finder.encode(text)).ids:
            parts, done = [], 0
            for token, (start, _) in zip(found.tokens, found.offsets, strict=True):
                inside = text.index(token, start) + 1
                parts.append(text[done:inside])
                done = inside
            text = _MARK.join([*parts, text[done:]])
        core = text.strip()
        if not core:
            return text
        sizes = range(1, min(self._longest, len(core)) + 1)
        within = core in self._spelled
        before = within or any(core[:n] + "\0" in self._spelled for n in sizes)
        after = within or any("\0" + core[-n:] in self._spelled for n in sizes)
        start = text.index(core)
        marked = _MARK * before + core + _MARK * after
        return text[:start] + marked + text[start + len(core) :]

    def _bytes(self, token: int) -> bytes:
        """The UTF-8 bytes, perhaps a part of a character, that `token` stands for; none for a special one."""
        piece = None if token in self._special_ids else self._tokenizer.id_to_token(token)
        if piece is None:  # also the ids that only pad the embedding
            return b""
        if self._byte_level:
            try:
                return bytes(map(_BYTES.__getitem__, piece))
            except KeyError:  # an added token is text as it stands
                return piece.encode()
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return piece.replace("▁", " ").encode()


class Detokenizer:
    """Token ids of one answer, one by one -> text in whole characters. The cost of a token is that of its bytes.

    The pieces joined are `tokenizer.decode` of all ids without special tokens. (The library's own `DecodeStream` holds
    back all text behind an invalid byte, decodes it again at every token, and has no way to flush.)
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip: int) -> None:
        self._token_bytes = token_bytes
        self._strip = strip  # spaces to drop at the very start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that `token` completes; empty for a special token or an unfinished character."""
        text = self._utf8.decode(self._token_bytes(token))
        if self._strip and text:
            kept = text[: self._strip].lstrip(" ") + text[self._strip :]
            self._strip = 0 if kept else self._strip - len(text)
            return kept
        return text

    def flush(self) -> str:
        """The rest at the end of the answer: U+FFFD when it ends within a character."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Ends a text before the first of several strings, whatever the pieces it arrives in.

    First is the one whose end comes first; of those, the longest. Only text that may begin a stop string is held back.

    Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError("stop: an empty string", "leave it out")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """What can be shown now. After it, `hit` tells whether a stop string was met; then nothing follows."""
        if self.hit:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        self._held = ""
        return text

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2's bytes_to_unicode): printable Latin-1 is itself, the rest shifted."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not Unicode: a lone surrogate at character {error.start}", "send it as UTF-8"
        ) from None


def _open_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
        # The library keeps the pieces of 10,000 different words, which on a board that runs for months is memory that
        # grows with what people say.
        tokenizer.model._resize_cache(_CACHED_WORDS)
        return tokenizer
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: {error}", "convert the model again") from None


def _special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )


def _decoder_kind(tokenizer: Tokenizer) -> tuple[bool, int]:
    """(byte-level, spaces stripped at the start), from the tokenizer's decoder."""
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {"type": "none"}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if steps.keys() == {"ByteLevel"}:
        return True, 0
    if {"Replace", "ByteFallback", "Fuse"} <= steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return False, steps.get("Strip", {"start": 0})["start"]
    raise ModelError(
        f"tokenizer.json: the decoder {' + '.join(steps)} is not supported",
        "byte-level BPE and SentencePiece BPE with byte fallback are",
    )


def _open_template(path: Path) -> Template | None:
    """The compiled template, or None when there is no such file. The environment is that of Hugging Face's
    `apply_chat_template` (transformers, utils/chat_template_utils.py)."""
    if not path.exists():
        return None

    def refuse(message: str) -> NoReturn:
        raise RequestError(f"the model's chat template refuses the request: {message}")

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (TemplateError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}", "the template needs another version, or is damaged") from None


def _render(template: Template, **names: Any) -> str:
    try:
        with _step_limit(_TEMPLATE_STEPS):
            return template.render(**names, tools=None, documents=None, add_generation_prompt=True)
    except RequestError:
        raise
    except Exception as error:  # whatever the template's expressions raise
        raise ModelError(f"chat_template.jinja: {type(error).__name__}: {error}", "the template is at fault") from None


@contextmanager
def _step_limit(steps: int) -> Iterator[None]:
    """Ends Python code in the block that goes on for more than `steps` lines and calls.

    The sandbox keeps a template from reaching out, and bounds one range() but not loops within loops.
    """

    def trace(_frame: FrameType, _event: str, _arg: Any) -> Any:
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise TimeoutError("it does not come to an end")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)
