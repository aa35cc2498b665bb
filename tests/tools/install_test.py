"""tools/pip/install.py: a lock is followed to the letter, and a wheel that differs from it stops the installation."""

import base64
import hashlib
import pathlib
import sys
import zipfile

import pytest

from tools.pip import install


def make_wheel(folder: pathlib.Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()):
    """A wheel as pip accepts it. Returns its pin, with its hash."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = files | {
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {line}\n" for line in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(path, text)
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels, the only one that pip sees."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def write_lock(path: pathlib.Path, *pins: str) -> pathlib.Path:
    path.write_text("# made by hand\n" + "".join(pin.replace(" --hash", " \\\n    --hash") + "\n" for pin in pins))
    return path


def test_installs_each_distribution_in_a_folder_of_its_own(index, tmp_path):
    base = make_wheel(index, "base_lib", "1.0", {"base_lib/__init__.py": "answer = 42\n"})
    user = make_wheel(
        index,
        "user",
        "2.0",
        {"user.py": "import base_lib\n"},
        requires=("base-lib>=1", "absent", 'base-lib; extra == "never"', 'other; python_version < "3"'),
    )
    install.install([write_lock(tmp_path / "a.lock", base, user)], tmp_path / "out")
    assert (tmp_path / "out/base_lib/site/base_lib/__init__.py").read_text() == "answer = 42\n"
    assert list((tmp_path / "out/base_lib/site/base_lib/__pycache__").glob("*.pyc")), "not compiled"
    assert not (tmp_path / "out/base_lib/site/user.py").exists()
    assert not (tmp_path / "out/wheels").exists()
    build = (tmp_path / "out/BUILD.bazel").read_text()
    assert 'name = "user", data = ["user/site"], imports = ["user/site"], deps = [":base_lib"]' in build
    assert 'name = "base_lib", data = ["base_lib/site"], imports = ["base_lib/site"], deps = []' in build


def test_wrong_hash_stops(index, tmp_path):
    pin = make_wheel(index, "base", "1.0", {"base.py": ""})
    digest = pin.split(":")[1]
    lock = write_lock(tmp_path / "a.lock", pin.replace(digest, "0" * 64))
    with pytest.raises(install.InstallError, match="(?s)a wheel differs from its hash in a.lock.*" + digest):
        install.install([lock], tmp_path / "out")
    assert not (tmp_path / "out/BUILD.bazel").exists()
    assert not (tmp_path / "out/base").exists()


def test_pin_without_hash_stops(index, tmp_path):
    make_wheel(index, "base", "1.0", {"base.py": ""})
    with pytest.raises(install.InstallError, match="--hash"):
        install.install([write_lock(tmp_path / "a.lock", "base==1.0")], tmp_path / "out")


def test_missing_wheel_names_distribution_python_and_lock(index, tmp_path):
    pin = make_wheel(index, "base", "1.0", {"base.py": ""}).replace("==1.0", "==9.0")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(install.InstallError, match=f"no wheel of base===9.0 for Python {python}, which a.lock pins"):
        install.install([write_lock(tmp_path / "a.lock", pin)], tmp_path / "out")


def test_chooses_the_first_lock_whose_wheel_is_found(index, tmp_path):
    small = make_wheel(index, "net", "1.0+cpu", {"net.py": "size = 'small'\n"})
    large = make_wheel(index, "net", "1.0", {"net.py": "size = 'large'\n"})
    locks = [write_lock(tmp_path / "cpu.lock", small), write_lock(tmp_path / "cuda.lock", large)]
    install.install(locks, tmp_path / "first", "net")
    assert "small" in (tmp_path / "first/net/site/net.py").read_text()
    (index / "net-1.0+cpu-py3-none-any.whl").unlink()
    install.install(locks, tmp_path / "last", "net")
    assert "large" in (tmp_path / "last/net/site/net.py").read_text()


def test_a_forced_lock_ignores_the_other_build_of_the_same_version(index, tmp_path):
    make_wheel(index, "net", "1.0+cpu", {"net.py": "size = 'small'\n"})
    large = make_wheel(index, "net", "1.0", {"net.py": "size = 'large'\n"})
    install.install([write_lock(tmp_path / "cuda.lock", large)], tmp_path / "out", "net")
    assert "large" in (tmp_path / "out/net/site/net.py").read_text()


def test_a_found_wheel_with_a_wrong_hash_is_not_chosen(index, tmp_path):
    small = make_wheel(index, "net", "1.0+cpu", {"net.py": "size = 'small'\n"})
    large = make_wheel(index, "net", "1.0", {"net.py": "size = 'large'\n"})
    wrong = small.split(":")[0] + ":" + "0" * 64
    locks = [write_lock(tmp_path / "cpu.lock", wrong), write_lock(tmp_path / "cuda.lock", large)]
    install.install(locks, tmp_path / "out", "net")
    assert "large" in (tmp_path / "out/net/site/net.py").read_text()


def test_cuda_libraries_share_torchs_folder_and_triton_is_no_part_of_torch(index, tmp_path):
    pins = [
        make_wheel(index, "nvidia_cublas", "13.0", {"nvidia/cublas/lib/libcublas.so": ""}),
        make_wheel(index, "triton", "3.6.0", {"triton/__init__.py": ""}),
        make_wheel(index, "sympy", "1.0", {"sympy.py": ""}),
        make_wheel(
            index, "torch", "2.0", {"torch/__init__.py": ""}, requires=("nvidia-cublas", "triton", "sympy")
        ),
    ]
    install.install([write_lock(tmp_path / "a.lock", *pins)], tmp_path / "out")
    assert (tmp_path / "out/torch/site/nvidia/cublas/lib/libcublas.so").exists()
    build = (tmp_path / "out/BUILD.bazel").read_text()
    assert 'name = "torch", data = ["torch/site"], imports = ["torch/site"], deps = [":sympy"]' in build
    assert 'name = "triton"' in build and "nvidia" not in build


def test_wheel_data_and_execute_bits(index, tmp_path):
    pin = make_wheel(
        index,
        "tooled",
        "1.0",
        {
            "tooled/__init__.py": "",
            "tooled-1.0.data/purelib/tooled/extra.py": "",
            "tooled-1.0.data/platlib/top.py": "",
        },
    )
    install.install([write_lock(tmp_path / "a.lock", pin)], tmp_path / "out")
    assert (tmp_path / "out/tooled/site/tooled/extra.py").exists()
    assert (tmp_path / "out/tooled/site/top.py").exists()

    program = zipfile.ZipInfo("bin/program")
    program.external_attr = 0o755 << 16
    with zipfile.ZipFile(tmp_path / "executable-1-py3-none-any.whl", "w") as archive:
        archive.writestr(program, "")
        archive.writestr("executable-1.dist-info/METADATA", "Name: executable\n")
    install.unpack(tmp_path / "executable-1-py3-none-any.whl", tmp_path / "site")
    assert (tmp_path / "site/bin/program").stat().st_mode & 0o111


def test_headers_become_a_cc_library(index, tmp_path):
    pin = make_wheel(index, "pybind11", "3.0", {"pybind11/include/pybind11/pybind11.h": ""})
    install.install([write_lock(tmp_path / "a.lock", pin)], tmp_path / "out")
    assert 'cc_library(name = "pybind11_headers"' in (tmp_path / "out/BUILD.bazel").read_text()
