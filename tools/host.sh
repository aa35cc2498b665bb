# What the shell tools ask the host. Sourced by tools/bazel, tools/lane and .ci/run.

readonly FLA_VERSIONS="3.11 3.12 3.13" # tested first; the others are declared

say() { printf 'fla: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# runs_version PYTHON VERSION: does this interpreter run (a pyenv shim may not), and is it that version?
runs_version() {
  [ "$("$1" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$2" ]
}

# find_version VERSION: prints the path of a working Python of this version, from PATH or from pyenv.
find_version() {
  local python
  for python in "python$1" python3 "$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")"/versions/"$1".*/bin/python; do
    if runs_version "$python" "$1"; then
      "$python" -I -c 'import sys; print(sys.executable)'
      return
    fi
  done
  return 1
}

# find_python: prints the Python that the build uses: FLA_PYTHON, else the first supported one on PATH.
find_python() {
  local version python
  for version in $FLA_VERSIONS; do
    for python in ${FLA_PYTHON:-"python$version" python3}; do
      if runs_version "$python" "$version"; then
        "$python" -I -c 'import sys; print(sys.executable)'
        return
      fi
    done
  done
  return 1
}

# require_host: one clear message for each thing that a build needs and the host lacks.
require_host() {
  [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || die "needs x86-64 Linux; this is $(uname -s) $(uname -m)."
  "${CXX:-c++}" --version >/dev/null 2>&1 || "${CC:-cc}" -x c++ -E /dev/null >/dev/null 2>&1 ||
    die "no C++ compiler: install one (Debian, Ubuntu: apt-get install g++)."
  local python
  python=$(find_python) ||
    die "no working Python ${FLA_VERSIONS// /, }${FLA_PYTHON:+ at FLA_PYTHON=$FLA_PYTHON}:" \
      "install one (Debian: apt-get install python3.11-venv python3.11-dev), or name one with FLA_PYTHON=/path/to/python."
  "$python" -I -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python has no venv module: install it (Debian, Ubuntu: apt-get install python$(
      "$python" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv)."
}
