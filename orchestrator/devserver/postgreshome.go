package devserver

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// maxSocketPathBytes is what fits into a sockaddr_un, less its closing zero.
const maxSocketPathBytes = 107

// postgresHome is where the data is, whose it is, and which server fits it.
type postgresHome struct {
	dataDir      string // as PGDATA
	account      account
	installation installation
}

// unfinishedDir is where initdb works; its result moves to dataDir in one step,
// so that a kill in the middle never leaves half a cluster there.
func (h postgresHome) unfinishedDir() string { return h.dataDir + ".unfinished" }

// writeFile writes a configuration file of the server.
func (h postgresHome) writeFile(name, text string) error {
	path := filepath.Join(h.dataDir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return h.account.own(path)
}

// choosePostgresHome finds existing data, or a place for new data that the
// account which Postgres will run as can reach.
func choosePostgresHome(config Config) (postgresHome, error) {
	var home postgresHome
	inside := filepath.Join(config.DataDir, "postgres")
	shared, err := sharedHome(config, false)
	if err != nil {
		return home, err
	}
	existing := ""
	for _, directory := range []string{inside, shared} {
		if directory != "" && existing == "" && exists(directory) {
			existing = directory
		}
	}
	if home.account, err = postgresAccount(existing); err != nil {
		return home, err
	}
	home.dataDir = existing
	if existing == "" {
		home.dataDir = inside
		if !canEnter(config.DataDir, home.account) {
			if home.dataDir, err = sharedHome(config, true); err != nil {
				return home, err
			}
			if !canEnter(filepath.Dir(home.dataDir), home.account) {
				return home, fmt.Errorf("account %s, as which Postgres has to run, can enter neither %s nor %s: choose another data directory",
					home.account.name, config.DataDir, filepath.Dir(home.dataDir))
			}
			config.Progress(fmt.Sprintf("account %s cannot enter %s: Postgres keeps its data in %s",
				home.account.name, config.DataDir, home.dataDir))
		}
	}
	return home, nil
}

// sharedHome is the data directory outside DataDir. The two are tied by a name
// drawn at random and noted in DataDir: whoever removes DataDir to start afresh
// does start afresh. Without create, "" means that there is none.
func sharedHome(config Config, create bool) (string, error) {
	notePath := filepath.Join(config.DataDir, "postgres-is-elsewhere")
	note, err := os.ReadFile(notePath)
	if err == nil {
		return strings.TrimSpace(string(note)), nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("reading where the data of Postgres is: %w", err)
	}
	if !create {
		return "", nil
	}
	directory := filepath.Join(config.SharedDir, strings.ToLower(rand.Text())[:16], "postgres")
	if err := os.MkdirAll(filepath.Dir(directory), 0o755); err != nil {
		return "", fmt.Errorf("creating a directory for the data of Postgres: %w", err)
	}
	if err := os.WriteFile(notePath, []byte(directory+"\n"), 0o644); err != nil {
		return "", fmt.Errorf("noting where the data of Postgres is: %w", err)
	}
	return directory, nil
}

// initialise makes sure that home.dataDir holds a cluster that an installation
// on this machine can serve, and notes that installation in home.
func initialise(ctx context.Context, config Config, home *postgresHome) error {
	dataMajor, err := majorOfData(home.dataDir)
	if err != nil {
		return err
	}
	if home.installation, err = findPostgres(ctx, config.PostgresBin, home.account, dataMajor, home.dataDir); err != nil {
		return err
	}
	if dataMajor != 0 {
		return removeStaleFiles(home.dataDir)
	}
	config.Progress(fmt.Sprintf("creating a database cluster with PostgreSQL %s in %s", home.installation.version, home.dataDir))
	unfinished := home.unfinishedDir()
	if err := os.RemoveAll(unfinished); err != nil {
		return fmt.Errorf("removing an unfinished cluster: %w", err)
	}
	if err := os.Mkdir(unfinished, 0o700); err != nil {
		return fmt.Errorf("creating a directory for the cluster: %w", err)
	}
	if err := home.account.own(unfinished); err != nil {
		return fmt.Errorf("giving the cluster to account %s: %w", home.account.name, err)
	}
	child, err := startChild(childSpec{
		name: "initdb",
		path: filepath.Join(home.installation.binDir, "initdb"),
		args: []string{"--pgdata", unfinished, "--username", DatabaseName, "--encoding", "UTF8", "--locale", "C",
			"--auth-local", "peer", "--auth-host", "reject", "--no-instructions"},
		dir:         unfinished,
		env:         serverEnvironment(),
		account:     home.account,
		logPath:     filepath.Join(config.DataDir, "initdb.log"),
		deathSignal: syscall.SIGKILL,
	})
	if err != nil {
		return err
	}
	select {
	case <-child.ended:
	case <-ctx.Done():
		// initdb works through children of its own, which end when it does, but
		// a moment later.
		return errors.Join(fmt.Errorf("creating a database cluster: %w", ctx.Err()), child.stop(ctx),
			endOrphans(context.WithoutCancel(ctx), unfinished, config.Progress))
	}
	if !child.endOK {
		return child.deathError()
	}
	if err := os.Rename(unfinished, home.dataDir); err != nil {
		return fmt.Errorf("moving the cluster into place: %w", err)
	}
	return nil
}

// majorOfData is the major version of the server that made the data; 0: none.
func majorOfData(dataDir string) (int, error) {
	if !exists(dataDir) {
		return 0, nil
	}
	text, err := os.ReadFile(filepath.Join(dataDir, "PG_VERSION"))
	if err != nil {
		return 0, fmt.Errorf("%s exists but holds no Postgres data that we can read: %w", dataDir, err)
	}
	major, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("reading the version of the data in %s: %w", dataDir, err)
	}
	return major, nil
}

// removeStaleFiles takes away what a killed postmaster left. It names a process
// id, and the server refuses to start while any process of ours has that id,
// which after a restart of a container or machine need not be a Postgres. We
// know better: we hold the lock, and no Postgres works in this directory.
func removeStaleFiles(dataDir string) error {
	err := os.Remove(filepath.Join(dataDir, "postmaster.pid"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing the trace of a killed Postgres: %w", err)
	}
	return nil
}

// prepareSocketDir makes an empty private directory for the socket, in the data
// directory where the path is short enough and free of characters that mean
// something in a list of directories or hosts, else in the temporary directory.
func prepareSocketDir(dataDir string, home postgresHome) (string, error) {
	socketName := fmt.Sprintf(".s.PGSQL.%d", postgresPort)
	directory := filepath.Join(filepath.Dir(home.dataDir), "socket")
	if len(filepath.Join(directory, socketName)) > maxSocketPathBytes || strings.ContainsAny(directory, `,"'\%+`) {
		sum := sha256.Sum256([]byte(dataDir))
		directory = filepath.Join(os.TempDir(), "holdfast-"+hex.EncodeToString(sum[:8]))
		if len(filepath.Join(directory, socketName)) > maxSocketPathBytes {
			return "", fmt.Errorf("neither %s nor %s leaves room for a socket of at most %d bytes: choose a data directory with a shorter path",
				home.dataDir, os.TempDir(), maxSocketPathBytes)
		}
	}
	if err := os.Mkdir(directory, 0o700); err == nil {
		if err := home.account.own(directory); err != nil {
			return "", fmt.Errorf("giving the socket directory to account %s: %w", home.account.name, err)
		}
	} else if !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("creating the socket directory: %w", err)
	}
	// In a shared temporary directory somebody else may have been first.
	info, err := os.Lstat(directory)
	if err != nil {
		return "", fmt.Errorf("looking at the socket directory: %w", err)
	}
	if owner := int(info.Sys().(*syscall.Stat_t).Uid); !info.IsDir() || owner != home.account.uid || info.Mode().Perm() != 0o700 {
		return "", fmt.Errorf("%s should be a directory of account %s, closed to others, and is not: remove it", directory, home.account.name)
	}
	for _, stale := range []string{socketName, socketName + ".lock"} {
		if err := os.Remove(filepath.Join(directory, stale)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("removing a stale socket: %w", err)
		}
	}
	return directory, nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
