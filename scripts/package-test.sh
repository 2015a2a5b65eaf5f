#!/usr/bin/env bash
# Tries the Debian package: installed, started, upgraded, removed and purged in a Debian of its own, below target/.
#
#   scripts/package-test.sh [PROFILE [TARGET]]     the build to pack (dev); it must be there:
#                                                  cargo build [--profile PROFILE] --features shipped
#
# Needs root, cargo-deb (cargo install cargo-deb), mmdebstrap and mosquitto-clients. First in a chroot without an init: the service is
# started as its unit says (command, user, directory), by hand, with a socket that hears what it tells systemd; a client of this
# machine leaves a message there. Then, where there is systemd-nspawn (systemd-container) and it is allowed, that Debian is booted
# without a network, and its systemd starts the service in its sandbox, reloads, upgrades and removes it, and starts it again when it
# stands still.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

profile=${1:-dev}
target=${2:-}
# The package depends on libraries of the Debian that it was built on.
suite=${SUITE:-$(. /etc/os-release; [ "${ID:-}" = debian ] && echo "${VERSION_CODENAME:-}")}
suite=${suite:-bookworm}
work=$root/target/package-test
debian=$work/root
pid=

stop_all() {
  if [ -n "$pid" ]; then kill -KILL "$pid" 2>/dev/null || true; fi
  if mountpoint -q "$debian/proc"; then umount "$debian/proc"; fi
}
trap stop_all EXIT

fail() { echo "scripts/package-test.sh: $*" >&2; exit 1; }

inside() { chroot "$debian" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive "$@"; }

# Stripped, as a package is, only if it is the real build: of a debug build that takes long.
strip=--no-strip
if [ "$profile" = dist ]; then strip=--strip; fi

pack() { # REVISION
  scripts/deb.sh "$profile" "$target" "$strip" --fast --deb-revision "$1" --output "$work/packages/$1/" >/dev/null
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# Starts the service as the unit says, on ports that are free here, and waits until it says that it is ready.
start() {
  local unit=$debian/lib/systemd/system/mqtt-server.service command user
  command=$(sed -n 's/^ExecStart=//p' "$unit")
  user=$(sed -n 's/^User=//p' "$unit")
  directory=$(sed -n 's/^WorkingDirectory=//p' "$unit")
  mqtt=$(free_port) grpc=$(free_port) http=$(free_port)
  rm -f "$debian/run/notify" "$work/told"
  python3 - "$debian/run/notify" "$work/told" <<'PYTHON' &
import os, socket, sys
heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
heard.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
with open(sys.argv[2], "wb", buffering=0) as told:
    while True:
        said = heard.recv(4096)
        told.write(said)
        if b"STOPPING=1" in said:
            break
PYTHON
  until [ -S "$debian/run/notify" ]; do sleep 0.1; done
  # shellcheck disable=SC2086
  chroot "$debian" sh -c 'cd "$1" && shift && exec setpriv --reuid "$1" --regid "$1" --init-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all env -i NOTIFY_SOCKET=/run/notify MQTT_SERVER_ADDR=127.0.0.1:"$2" \
    MQTT_SERVER_GRPC_ADDR=127.0.0.1:"$3" MQTT_SERVER_HTTP_ADDR=127.0.0.1:"$4" $5' \
    sh "$directory" "$user" "$mqtt" "$grpc" "$http" "$command" >"$work/log" 2>&1 &
  pid=$!
  for _ in $(seq 600); do
    if grep -q READY=1 "$work/told" 2>/dev/null; then return; fi
    kill -0 "$pid" 2>/dev/null || { cat "$work/log" >&2; fail "the service ended before it was ready"; }
    sleep 0.1
  done
  cat "$work/log" >&2
  fail "the service did not say that it is ready"
}

stop() {
  kill -TERM "$pid"
  wait "$pid" || fail "the service ended with code $?"
  pid=
  grep -q STOPPING=1 "$work/told" || fail "the service did not say that it stops"
}

rm -rf "$debian"
mkdir -p "$work/packages"
if [ ! -f "$work/$suite.tar" ]; then
  say "making a Debian ($suite)"
  mmdebstrap --quiet --variant=minbase --include=systemd,adduser,init-system-helpers "$suite" "$work/$suite.tar"
fi
mkdir "$debian"
tar -xf "$work/$suite.tar" -C "$debian" --exclude='./dev/*'
mount -t proc proc "$debian/proc"
mkdir -p "$debian/dev"
[ -c "$debian/dev/null" ] || mknod -m 666 "$debian/dev/null" c 1 3
[ -c "$debian/dev/urandom" ] || mknod -m 666 "$debian/dev/urandom" c 1 9

say "packing twice, for an upgrade"
pack 1
pack 2
cp "$work"/packages/1/*.deb "$debian/tmp/one.deb"
cp "$work"/packages/2/*.deb "$debian/tmp/two.deb"
dpkg-deb --info "$debian/tmp/one.deb" | sed -n 's/^ \(Version\|Depends\|Installed-Size\)/  \1/p'

say "install"
inside dpkg -i /tmp/one.deb
inside id mqtt-server
[ "$(inside stat -c %U:%a /var/lib/mqtt-server)" = mqtt-server:700 ] || fail "the state directory is open, or not the user's"
[ "$(inside stat -c %U:%G:%a /etc/mqtt-server/mqtt-server.toml)" = root:mqtt-server:640 ] || fail "the configuration has other rights"
inside dpkg-query -W -f '${Conffiles}\n' mqtt-server | grep -q mqtt-server.toml || fail "the configuration is no conffile"
[ -L "$debian/etc/systemd/system/multi-user.target.wants/mqtt-server.service" ] || fail "the service is not enabled"

say "man pages and completions"
for page in mqtt-server mqtt-server-ctl mqtt-server-ctl-groups-dead-letters; do
  [ -f "$debian/usr/share/man/man1/$page.1.gz" ] || fail "there is no man page $page"
done
# The shell says which word completes what: the script is read without a fault.
inside bash -ec '. /usr/share/bash-completion/completions/mqtt-server && complete -p mqtt-server' >/dev/null
if command -v man >/dev/null; then
  told=$(find "$debian/usr/share/man/man1" -name 'mqtt-server*.gz' -exec man --warnings -E UTF-8 -l -Tutf8 {} + 2>&1 >/dev/null)
  [ -z "$told" ] || fail "man has warnings: $told"
else
  skip "man pages, read by man" "man is missing (apt install man-db)"
fi
for shell in zsh fish; do
  case $shell in zsh) script=zsh/vendor-completions/_mqtt-server ;; fish) script=fish/vendor_completions.d/mqtt-server.fish ;; esac
  if command -v $shell >/dev/null; then $shell -n "$debian/usr/share/$script"; else skip "completions, read by $shell" "$shell is missing"; fi
done
if [ "$profile" != dist ]; then
  skip "lintian" "a build for trying has its symbols, which a package is not to have"
elif command -v lintian >/dev/null; then
  lintian --fail-on error,warning "$debian/tmp/one.deb" || fail "lintian (above)"
else
  skip "lintian" "lintian is missing"
fi

say "the unit, read by systemd"
inside systemd-analyze verify --man=no /lib/systemd/system/mqtt-server.service
inside systemd-analyze security --no-pager --offline=yes /lib/systemd/system/mqtt-server.service | tail -n 1

say "start, and a retained message"
inside setpriv --reuid mqtt-server --regid mqtt-server --init-groups sh -c \
  'cd /var/lib/mqtt-server && mqtt-server --config /etc/mqtt-server/mqtt-server.toml --check'
start
mosquitto_pub -h 127.0.0.1 -p "$mqtt" -i package -q 1 -r -t package/test -m kept
exec 3<>"/dev/tcp/127.0.0.1/$http"
printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3
head -n 1 <&3 | grep -q ' 200 ' || fail "/readyz is not 200"
exec 3>&-
stop

say "upgrade: a changed configuration and what was kept stay"
echo '# mine' >>"$debian/etc/mqtt-server/mqtt-server.toml"
inside dpkg -i /tmp/two.deb
inside dpkg-query -W -f '${Version}\n' mqtt-server | grep -q -- '-2$' || fail "the version is not the new one"
grep -q '^# mine' "$debian/etc/mqtt-server/mqtt-server.toml" || fail "the configuration was replaced"
start
[ "$(mosquitto_sub -h 127.0.0.1 -p "$mqtt" -i reader -t package/test -C 1 -W 30)" = kept ] || fail "the retained message is gone"
stop

say "remove: the program goes, configuration and data stay"
inside dpkg -r mqtt-server
[ ! -e "$debian/usr/bin/mqtt-server" ] || fail "the program is still there"
[ -f "$debian/etc/mqtt-server/mqtt-server.toml" ] && [ -d "$debian/var/lib/mqtt-server/data" ] || fail "more than the program went"

say "purge: nothing is left but the user"
inside dpkg -P mqtt-server
for gone in etc/mqtt-server var/lib/mqtt-server etc/systemd/system/multi-user.target.wants/mqtt-server.service; do
  [ ! -e "$debian/$gone" ] && [ ! -L "$debian/$gone" ] || fail "/$gone is left"
done
umount "$debian/proc"

if ! command -v systemd-nspawn >/dev/null; then
  skip "the service under a systemd of its own" "systemd-nspawn is missing (apt install systemd-container)"
  report_skipped
  exit
fi

say "under systemd"
cp "$work"/packages/1/*.deb "$debian/root/one.deb"
cp "$work"/packages/2/*.deb "$debian/root/two.deb"
cat >"$debian/root/try" <<'INSIDE'
#!/bin/bash
exec >/root/said 2>&1
trap 'touch /root/ended; systemctl poweroff' EXIT
set -ex
main() { systemctl show --value -p MainPID mqtt-server; }
ready() { exec 3<>/dev/tcp/127.0.0.1/9090 && printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3 && head -n 1 <&3 | grep ' 200 '; }
# The installation waits until the service says that it is ready.
dpkg -i /root/one.deb
ready
grep '^CapBnd:[[:space:]]*0*$' "/proc/$(main)/status"
grep '^NoNewPrivs:[[:space:]]*1$' "/proc/$(main)/status"
grep '^Seccomp:[[:space:]]*2$' "/proc/$(main)/status"
before=$(main)
systemctl reload mqtt-server
ready
[ "$(main)" = "$before" ]
dpkg -i /root/two.deb
ready
[ "$(main)" != "$before" ]
# A process that stands still is ended, and another one started.
mkdir -p /run/systemd/system/mqtt-server.service.d
printf '[Service]\nWatchdogSec=3\n' >/run/systemd/system/mqtt-server.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart mqtt-server
before=$(main)
kill -STOP "$before"
for _ in $(seq 60); do
  [ "$(main)" != "$before" ] && systemctl is-active mqtt-server && break
  sleep 1
done
ready
journalctl -u mqtt-server --no-pager | grep 'Watchdog timeout'
dpkg -r mqtt-server
! systemctl is-active mqtt-server
dpkg -P mqtt-server
touch /root/passed
INSIDE
chmod +x "$debian/root/try"
printf '[Unit]\nAfter=basic.target\n[Service]\nType=oneshot\nExecStart=/root/try\n' >"$debian/etc/systemd/system/try.service"
mkdir -p "$debian/etc/systemd/system/multi-user.target.wants"
ln -sf ../try.service "$debian/etc/systemd/system/multi-user.target.wants/try.service"
timeout 300 systemd-nspawn --quiet --register=no --keep-unit --private-network -D "$debian" --boot --console=pipe \
  </dev/null >"$work/boot" 2>&1 || true
if [ ! -f "$debian/root/ended" ]; then
  tail -n 5 "$work/boot" >&2
  skip "the service under a systemd of its own" "it could not be booted here (above)"
elif [ ! -f "$debian/root/passed" ]; then
  tail -n 40 "$debian/root/said" >&2
  fail "the service under systemd (above)"
fi
report_skipped
say "done"
