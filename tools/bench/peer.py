"""llama.cpp as a contender, through xllamacpp and the timings that llama.cpp's own server reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.question import prompt


def system_info() -> str | None:
    """What llama.cpp says it uses of this CPU; None without xllamacpp."""
    try:
        import xllamacpp
    except ImportError:
        return None
    return f"xllamacpp {xllamacpp.__version__}; {xllamacpp.get_system_info().strip(' |')}"


class LlamaCpp:
    """One slot of `max_tokens`; all else as llama.cpp comes, but greedy with the shortest chain of samplers."""

    def __init__(self, label: str, path: Path, threads: int, max_tokens: int) -> None:
        import xllamacpp

        self.label = label
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel = max_tokens, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = 0  # no copies of old prompts beside the slot
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def complete(self, tokens: Sequence[int], count: int, reuse: bool = False) -> dict[str, Any]:
        """Greedy, `count` tokens whatever they are; `reuse` keeps the rows of the slot that still fit."""
        request = {
            "prompt": list(tokens),
            "max_tokens": count,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": reuse,
        }
        answer: dict[str, Any] = self._server.handle_completions(request)
        if "timings" not in answer:
            raise RuntimeError(f"{self.label}: {answer}")
        return answer

    def fill(self, n: int) -> None:
        """Make the slot hold exactly the prompt of n tokens."""
        self.complete(prompt(n), 1, reuse=True)

    def decode_ms(self, n: int, steps: int) -> float:
        """ms per token, the average over `steps` from n on.

        The first token of a completion comes from the prompt's logits, so one more is asked for than steps are timed
        (llama.cpp's predicted_ms starts at that first token).
        """
        timings = self.complete(prompt(n), steps + 1, reuse=True)["timings"]
        assert timings["predicted_n"] == steps + 1
        return float(timings["predicted_ms"]) / steps

    def prefill_rate(self, n: int) -> float:
        """Tokens per second of a prompt, from nothing to the first token chosen."""
        timings = self.complete(prompt(n), 1)["timings"]
        assert timings["prompt_n"] == n
        return float(timings["prompt_per_second"])
