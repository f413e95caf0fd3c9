"""python -m tools.convert SOURCE TARGET: a GGUF file or a Hugging Face folder into a model folder for the agent."""

import argparse
import signal
import sys
from pathlib import Path

from skerry.errors import SkerryError
from tools.convert.folder import convert


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.convert", description=__doc__)
    parser.add_argument("source", type=Path, help="a .gguf file, or a folder with config.json and *.safetensors")
    parser.add_argument("target", type=Path, help="the model folder to write")
    parser.add_argument("--name", default="", help="name of the model (default: the source's)")
    parser.add_argument("--licence", default="", help="licence of the weights, as an SPDX identifier")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is unfinished is removed
    try:
        manifest = convert(arguments.source, arguments.target, arguments.name, arguments.licence)
    except SkerryError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"convert: {error.filename or arguments.target}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convert: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    size = sum(stored.bytes for stored in manifest.files.values())
    print(f"{arguments.target}: {manifest.name}, {manifest.geometry.layers} layers, {size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
