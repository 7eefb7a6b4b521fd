package devserver

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// dropAccounts are the accounts that Postgres may run as when we are root,
// which Postgres itself refuses to be; the first that exists is taken.
var dropAccounts = []string{"postgres", "nobody", "daemon"}

// account is the operating system account that a child runs as.
type account struct {
	name string
	uid  int
	gid  int
	drop bool // differs from ours, so the child must change to it
}

// credential is what exec needs to change to the account; nil: stay.
func (a account) credential() *syscall.Credential {
	if !a.drop {
		return nil
	}
	return &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
}

// own hands a path to the account.
func (a account) own(path string) error {
	if !a.drop {
		return nil
	}
	return os.Chown(path, a.uid, a.gid)
}

// ourAccount is the account of this process, for children that keep it.
func ourAccount() (account, error) {
	current, err := user.Current()
	if err != nil {
		return account{}, fmt.Errorf("looking up our own account: %w", err)
	}
	return accountOf(current, false)
}

// postgresAccount chooses whom Postgres runs as. As an ordinary user that is
// ourselves. As root it is the owner of the data, if there is data already, so
// that root may also continue what an ordinary user began.
func postgresAccount(existingDataDir string) (account, error) {
	if os.Geteuid() != 0 {
		return ourAccount()
	}
	if existingDataDir != "" {
		info, err := os.Stat(existingDataDir)
		if err != nil {
			return account{}, fmt.Errorf("looking at the data directory: %w", err)
		}
		uid := int(info.Sys().(*syscall.Stat_t).Uid)
		owner, err := user.LookupId(strconv.Itoa(uid))
		if err != nil {
			return account{}, fmt.Errorf("looking up the owner of %s: %w", existingDataDir, err)
		}
		if uid == 0 {
			return account{}, fmt.Errorf("%s belongs to root, as whom Postgres does not run: give it to another account or choose another data directory", existingDataDir)
		}
		return accountOf(owner, true)
	}
	for _, name := range dropAccounts {
		if found, err := user.Lookup(name); err == nil {
			return accountOf(found, true)
		}
	}
	return account{}, fmt.Errorf("Postgres does not run as root, and none of the accounts %v exists: create one, or run as an ordinary user", dropAccounts)
}

func accountOf(u *user.User, drop bool) (account, error) {
	uid, uidErr := strconv.Atoi(u.Uid)
	gid, gidErr := strconv.Atoi(u.Gid)
	if err := errors.Join(uidErr, gidErr); err != nil {
		return account{}, fmt.Errorf("reading the ids of account %s: %w", u.Username, err)
	}
	return account{name: u.Username, uid: uid, gid: gid, drop: drop}, nil
}
