#!/bin/sh
# Debian's Chromium for the tests of the pages, where it is missing and may be installed. Without one they are skipped, and say so.
set -eu
for name in chromium chromium-browser google-chrome; do
    command -v "$name" > /dev/null && exit 0
done
if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq > /dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null && exit 0
fi
echo "NO BROWSER, SO THE PAGES ARE NOT TESTED: install Debian's package chromium" >&2
