#!/usr/bin/env bash
# Puts ONNX Runtime's C headers into build/ort-headers (or the folder given), where CMake looks for them.
#
# Usage: scripts/ort_headers.sh [FOLDER]
#
# ORT_ARCHIVE  a release archive of ONNX Runtime (.tgz), a file or a URL; without it the distribution's package
#              libonnxruntime-dev is unpacked, by any user and without installing it.
# ORT_SUITE    the release of the distribution to take the package from, where the configured ones lack it
#              (Debian: trixie).
set -euo pipefail

fail() {
  echo "ort_headers.sh: $*" >&2
  exit 1
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(realpath --canonicalize-missing "${1:-$root/build/ort-headers}")"  # apt runs in another folder
if [[ -e "$folder" && ! -f "$folder/onnxruntime_c_api.h" ]]; then fail "$folder is there and holds something else"; fi
mkdir -p "$(dirname "$folder")"
work="$(mktemp -d "$(dirname "$folder")/.ort-headers.XXXXXX")"
trap 'rm -rf "$work"' EXIT

# Unpacks a release archive into $work/unpacked.
from_archive() {
  local archive="$ORT_ARCHIVE"
  if [[ "$archive" == *://* ]]; then
    archive="$work/archive.tgz"
    if command -v curl >/dev/null; then
      curl --fail --location --silent --show-error --output "$archive" "$ORT_ARCHIVE"
    else
      wget --quiet --output-document="$archive" "$ORT_ARCHIVE"
    fi
  fi
  [[ -f "$archive" ]] || fail "ORT_ARCHIVE names no file: $archive"
  tar --extract --file "$archive" --directory "$work/unpacked"
}

# Unpacks libonnxruntime-dev of the configured releases, or of ORT_SUITE, into $work/unpacked.
from_package() {
  command -v apt-get >/dev/null || fail "no apt-get here: set ORT_ARCHIVE to ONNX Runtime's release archive (.tgz)"
  local options=()
  if [[ -n "${ORT_SUITE:-}" ]] || ! apt-cache show libonnxruntime-dev >/dev/null 2>&1; then
    # A private set of package lists for one more release; the system's own stay as they are.
    local id codename archive component keyring suite
    id="$(. /etc/os-release && echo "$ID")"
    codename="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"
    case "$id" in
      debian) component=main suite="${ORT_SUITE:-trixie}" keyring=/usr/share/keyrings/debian-archive-keyring.gpg ;;
      ubuntu) component=universe suite="${ORT_SUITE:-}" keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg ;;
      *) fail "$id has no libonnxruntime-dev: set ORT_ARCHIVE to ONNX Runtime's release archive (.tgz)" ;;
    esac
    [[ -n "$suite" ]] || fail "$id $codename lacks libonnxruntime-dev: set ORT_SUITE to one that has it, or ORT_ARCHIVE"
    archive="$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Component: $component" \
      "Release: $codename" | head -n 1)"
    [[ -n "$archive" ]] || fail "no package archive of $id $codename is configured: set ORT_ARCHIVE"
    mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial"
    echo "deb [signed-by=$keyring] $archive $suite $component" >"$work/apt/sources.list"
    options=(
      -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
      -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null
      -o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache"
      -o Acquire::Languages=none -o "APT::Sandbox::User=$(id -un)" -o Debug::NoLocking=1
    )
    apt-get "${options[@]}" --quiet=2 update
  fi
  (cd "$work" && apt-get ${options[@]+"${options[@]}"} --quiet=2 download libonnxruntime-dev) ||
    fail "the package archive has no libonnxruntime-dev: set ORT_SUITE to a release with it, or ORT_ARCHIVE"
  dpkg -x "$work"/libonnxruntime-dev_*.deb "$work/unpacked"
}

mkdir "$work/unpacked"
if [[ -n "${ORT_ARCHIVE:-}" ]]; then from_archive; else from_package; fi
header="$(find "$work/unpacked" -name onnxruntime_c_api.h -print -quit)"
[[ -n "$header" ]] || fail "there is no onnxruntime_c_api.h in ${ORT_ARCHIVE:-libonnxruntime-dev}"
rm -rf "$folder"
mv "$(dirname "$header")" "$folder"
version="$(sed -n 's/^#define ORT_API_VERSION \([0-9]*\).*/\1/p' "$folder/onnxruntime_c_api.h")"
echo "ONNX Runtime C API $version in $folder"
