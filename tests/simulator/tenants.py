"""What the file of tenants may have in it; salts are s1, s2 and so on, or none."""

from pathlib import Path

TENANTS_FILE = str(Path(__file__).with_name("tenants.json"))
"""What it has at first."""
TEXTS: tuple[bytes | None, ...] = (
    Path(TENANTS_FILE).read_bytes(),
    b'{"default": "0%", "guaranteed": {"one": {"share": "5%", "prefix": "s1"},'
    b' "three": {"share": "60%", "prefix": "s3"}}}',
    b'{"default": "100%"}',
    b'{"guaranteed": {"two": {"share": "50%", "prefix": ["s1", "s2"]},'
    b' "one": {"share": "50%", "prefix": "s3"}}}',
    b'{"guaranteed": {"two": {"share": "90%", "prefix": "s2"},'
    b' "one": {"share": "50%", "prefix": "s3"}}}',
    None,
)
"""Each may follow on each; the last two cannot be used."""
