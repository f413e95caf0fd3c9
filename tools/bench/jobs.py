"""The child of each contender."""

from skerry.core import Message, Role
from skerry.text import Text
from tools.bench.child import MAX_TOKENS, Job
from tools.bench.question import OURS, QUESTION
from tools.bench.setting import Setting

_PEER_KV_ITEMSIZE = 2  # llama.cpp keeps keys and values in f16


class Jobs:
    """ours: with mapped weights; peers: of the files that are here; absent: the others, without values."""

    def __init__(self, setting: Setting, threads: int) -> None:
        model = setting.model
        known, geometry = model.manifest.tokens, model.manifest.geometry
        text = Text(model.path, known.end, known.bos, known.add_bos)
        prompt = tuple(text.encode_chat([Message(Role.USER, QUESTION)]))
        kv_bytes = MAX_TOKENS * geometry.kv_bytes_per_token(itemsize=_PEER_KV_ITEMSIZE)
        self.ours = Job(OURS, model.path.absolute(), threads, setting.cache.absolute())
        self.peers = [
            Job(peer.label, peer.path.absolute(), threads, prompt=prompt, kv_bytes=kv_bytes)
            for peer in setting.peers
            if peer.path
        ]
        self.absent: dict[str, list[float]] = {peer.label: [] for peer in setting.peers if peer.path is None}
