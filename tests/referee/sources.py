"""The source of torch's tests: a given checkout, or Debian's source package, of which only the tests are kept.

torch's wheels do not contain the tests, and this repository does not copy them.
"""

import hashlib
import tarfile
import urllib.request
from pathlib import Path

FOLDER = "test/distributed/checkpoint"
VERSION = "2.6.0"
URL = f"http://deb.debian.org/debian/pool/main/p/pytorch/pytorch_{VERSION}+dfsg.orig.tar.xz"
SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"


def tests_in(checkout: Path) -> Path:
    """The folder of tests in a checkout of PyTorch. `checkout` may also be that folder itself."""
    for folder in (checkout / FOLDER, checkout):
        if (folder / "test_file_system_checkpoint_cpu.py").is_file():
            return folder.absolute()
    raise SystemExit(f"{checkout} is no checkout of PyTorch: it has no {FOLDER}.")


def downloaded(cache: Path) -> Path:
    """The tests of torch `VERSION`. They are downloaded unless the cache has them."""
    checkout = cache / f"pytorch-{VERSION}"
    if not checkout.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        archive = cache / "pytorch.tar.xz"
        print(f"fetching {URL}")
        urllib.request.urlretrieve(URL, archive)
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256:
            raise SystemExit(f"{URL} is another file than expected: SHA-256 {found}.")
        extract(archive, checkout)
        archive.unlink()
    return tests_in(checkout)


def extract(archive: Path, checkout: Path) -> None:
    """Unpacks only the folder of tests."""
    partial = checkout.with_suffix(".part")
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            is_wanted = member.isfile() and name.startswith(f"{FOLDER}/") and ".." not in Path(name).parts
            found = tar.extractfile(member) if is_wanted else None
            if found is not None:
                path = partial / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(found.read())
    partial.rename(checkout)
