#!/usr/bin/env bash
# An OCI image of the agent and the command line, without torch, from Debian's packages and the wheels in requirements.txt.
# Needs root, mmdebstrap, umoci, a Debian mirror and a package index. Reads no registry.
#
#   build.sh LAYOUT [WHEEL]   write the image LAYOUT:VERSION, an OCI layout; WHEEL is built from this tree unless given
# `tools/release.py lock` writes requirements.txt.
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
target=(--only-binary :all: --implementation cp --python-version 3.11
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)

die() { echo "build.sh: $*" >&2; exit 1; }

build() {
  local layout=$1 wheel=${2:-} version
  command -v mmdebstrap >/dev/null || die "mmdebstrap is not installed"
  command -v umoci >/dev/null || die "umoci is not installed"
  [ "$(id -u)" -eq 0 ] || die "needs root"
  work=$(mktemp -d)
  trap 'rm -rf --one-file-system "$work"' EXIT  # not local: the trap runs after this function
  if [ -z "$wheel" ]; then
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" "$top"
    wheel=$(echo "$work"/*.whl)
  fi
  version=$(basename "$wheel" | cut -d- -f2)
  unpack "$work/root"
  install_packages "$work/root" "$wheel"
  prune "$work/root"
  pack "$work/root" "$layout" "$version"
}

# `extract`: no package manager and no shell get into the image, and no package's script runs.
unpack() {
  mmdebstrap --quiet --variant=extract --include=python3-minimal,libpython3.11-stdlib \
    --aptopt='Acquire::Check-Valid-Until "false"' bookworm "$1"
}

install_packages() {
  local site=$1/usr/local/lib/python3.11/dist-packages
  "$python" -m pip install --quiet --no-compile --no-deps --require-hashes --target "$site" "${target[@]}" \
    -r "$here/requirements.txt"
  "$python" -m pip install --quiet --no-compile --no-deps --target "$site" "$2"
  rm -r "$site/bin"  # the first lines of these scripts name the Python that ran pip
  install -d "$1/usr/local/bin"
  cat >"$1/usr/local/bin/replicated-ckpt" <<'END'
#!/usr/bin/python3
import sys
from replicated_ckpt.cli.main import main
sys.exit(main())
END
  chmod 755 "$1/usr/local/bin/replicated-ckpt"
  printf '%s\n' root:x:0:0:root:/root:/usr/sbin/nologin agent:x:1000:1000::/ckpt:/usr/sbin/nologin >"$1/etc/passwd"
  printf '%s\n' root:x:0: agent:x:1000: >"$1/etc/group"
  install -d -m 700 -o 1000 -g 1000 "$1/ckpt"
  install -d "$1"/{dev,proc,run,sys}
  install -d -m 1777 "$1/tmp"
}

prune() {
  local site=$1/usr/local/lib/python3.11/dist-packages lib=$1/usr/lib/python3.11 kept
  rm -rf "$1"/usr/{libexec,sbin,share}/* "$1"/sbin "$1"/bin/* "$1"/var/{cache,lib,log}/* \
    "$1"/usr/lib/x86_64-linux-gnu/{engines-3,gconv,krb5,ossl-modules} \
    "$1"/etc/{alternatives,apt,cron.daily,dpkg,fstab,gss,hostname,logrotate.d,netconfig,resolv.conf,rmt} \
    "$lib"/{distutils,ensurepip,idlelib,lib2to3,pydoc_data,test,tkinter,turtledemo,unittest} "$site"/fsspec/tests
  find "$1/usr/bin" -not -name 'python3*' -not -type d -delete
  # Modules that nothing here imports. Only they need some of the libraries.
  rm -f "$lib"/lib-dynload/{_sqlite3,_dbm,nis,_curses,_curses_panel,readline}.*.so
  prune_libraries "$1"
  # botocore describes every service of AWS; S3 needs its own, and those that give credentials.
  for kept in "$site"/botocore/data/*/; do
    case $(basename "$kept") in s3 | sso | sso-oidc | sts) ;; *) rm -r "$kept" ;; esac
  done
  # Not validated by time, because files in a layer have other times than on this machine.
  chroot "$1" /usr/bin/python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/python3.11 \
    /usr/local/lib/python3.11/dist-packages
}

# Removes shared libraries that neither Python nor its modules link to. glibc loads libnss and libgcc_s by itself.
prune_libraries() {
  local needed=" " file
  while read -r file; do
    needed+="$(chroot "$1" /lib64/ld-linux-x86-64.so.2 --list "${file#"$1"}" | awk '$2 == "=>" { printf "%s ", $3 }')"
  done < <(find "$1/usr/bin" "$1/usr/lib/python3.11" "$1/usr/local" -type f \( -name '*.so' -o -name 'python3.*' \))
  [ "$needed" != " " ] || die "no library is linked to Python"
  for file in "$1"/{usr/,}lib/x86_64-linux-gnu/*.so*; do
    case ${file##*/} in ld-linux* | libnss_* | libgcc_s*) continue ;; esac
    is_needed "$1" "$file" $needed || rm "$file"
  done
}

is_needed() {
  local root=$1 file=$2 each
  shift 2
  for each; do [ "$root$each" -ef "$file" ] && return; done
  return 1
}

pack() {
  local root=$1 layout=$2 version=$3
  rm -rf "$layout"
  umoci init --layout "$layout"
  umoci new --image "$layout:$version"
  umoci insert --image "$layout:$version" "$root" /
  umoci config --image "$layout:$version" --author replicated_ckpt --config.user 1000:1000 --config.workingdir /ckpt \
    --clear=config.entrypoint --config.cmd replicated-ckpt --config.cmd agent --config.cmd --root --config.cmd /ckpt \
    --config.env PATH=/usr/local/bin:/usr/bin --config.env PYTHONDONTWRITEBYTECODE=1 \
    --config.label org.opencontainers.image.title=replicated-ckpt-agent \
    --config.label "org.opencontainers.image.version=$version" \
    --config.label org.opencontainers.image.licenses=Apache-2.0
  umoci gc --layout "$layout"
  echo "$layout:$version: $(size_mb "$layout") MB compressed, $(size_mb "$root") MB unpacked"
}

size_mb() { echo $(($(du -sxb "$1" | cut -f1) / 1000000)); }

[ $# -ge 1 ] || { sed -n '5s/^# *//p' "$0" >&2; exit 2; }
build "$@"
