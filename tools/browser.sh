#!/bin/sh
# Debian's Chromium and Firefox for the tests of the pages, where they are missing and may be installed. Without one its tests are skipped, and say so.
set -eu
missing=
for package in chromium:chromium-browser:google-chrome firefox-esr:firefox; do
    found=
    for name in $(echo "$package" | tr : ' '); do
        command -v "$name" > /dev/null && found=yes
    done
    [ "$found" ] || missing="$missing ${package%%:*}"
done
[ "$missing" ] || exit 0
if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq > /dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing > /dev/null && exit 0
fi
echo "NO BROWSER, SO THE PAGES ARE NOT TESTED IN IT: install Debian's$missing" >&2
