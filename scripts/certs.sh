#!/usr/bin/env bash
# Makes development certificates with openssl: scripts/certs.sh [DIRECTORY]
#
# An alternative to `mqtt-server --dev`, which makes its own on first start. Existing files are kept.
# Result: ca.crt ca.key server.crt server.key client.crt client.key. Not for production: keys lie in the
# clear, and the authority is anyone who can read the directory.
set -euo pipefail
dir=${1:-$(cd "$(dirname "$0")/.." && pwd)/certs}
mkdir -p "$dir"
umask 077
days=365

ca() {
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days "$days" \
    -keyout "$dir/ca.key" -out "$dir/ca.crt" -subj "/CN=mqtt-server development CA" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" 2>/dev/null
}

# leaf NAME CERTIFICATE KEY EXTENSIONS
leaf() {
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
    -keyout "$dir/$3" -out "$dir/$2.csr" -subj "/CN=$1" 2>/dev/null
  openssl x509 -req -in "$dir/$2.csr" -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -CAcreateserial \
    -days "$days" -out "$dir/$2" -extfile <(printf '%s\n' "$4") 2>/dev/null
  rm -f "$dir/$2.csr"
}

command -v openssl >/dev/null || { echo "scripts/certs.sh needs openssl" >&2; exit 1; }
# As `mqtt-server --dev` does with a directory from before the key was called server.key.
if [ -f "$dir/private.key" ] && [ ! -e "$dir/server.key" ]; then
  mv "$dir/private.key" "$dir/server.key"
  ln -s server.key "$dir/private.key"
fi
if [ -e "$dir/ca.crt" ] && [ -e "$dir/server.crt" ] && [ -e "$dir/server.key" ]; then
  echo "certificates are already in $dir; remove them to make new ones"
  exit 0
fi
ca
leaf localhost server.crt server.key "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1
extendedKeyUsage=serverAuth"
leaf device client.crt client.key "extendedKeyUsage=clientAuth"
rm -f "$dir/ca.srl"
chmod 644 "$dir"/*.crt
echo "made $dir/{ca,server,client}.crt and their keys, valid $days days"
