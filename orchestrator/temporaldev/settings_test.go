package main

import (
	"errors"
	"flag"
	"io"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

const someURL = "--postgres-url=postgres://holdfast@/?host=/run/socket"

func TestParseSettingsDefaults(t *testing.T) {
	got, err := parseSettings([]string{someURL}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if got.frontendAddress != "127.0.0.1:0" || got.namespace != "holdfast" || got.retention != 72*time.Hour ||
		got.logLevel != "warn" || got.batchCommits {
		t.Errorf("the defaults are %+v", got)
	}
}

func TestParseSettingsRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want string // part of the error
	}{
		"no database":         {nil, "--postgres-url is required"},
		"not a URL":           {[]string{"--postgres-url=postgres://u:secret@[::1"}, "is not a URL"},
		"another scheme":      {[]string{"--postgres-url=mysql://u@127.0.0.1/"}, `"mysql"`},
		"a database":          {[]string{"--postgres-url=postgres://u@127.0.0.1/mine"}, `"mine"`},
		"no user":             {[]string{"--postgres-url=postgres://127.0.0.1/"}, "no user"},
		"no host":             {[]string{"--postgres-url=postgres://u@/"}, "neither a host"},
		"no port":             {[]string{someURL, "--frontend-address=127.0.0.1"}, "not host:port"},
		"open to the network": {[]string{someURL, "--frontend-address=0.0.0.0:7233"}, "loopback"},
		"a host name":         {[]string{someURL, "--frontend-address=localhost:7233"}, "loopback"},
		"port out of range":   {[]string{someURL, "--frontend-address=127.0.0.1:65536"}, "65536"},
		"port not a number":   {[]string{someURL, "--frontend-address=127.0.0.1:http"}, `"http"`},
		"empty namespace":     {[]string{someURL, "--namespace="}, "--namespace"},
		"no retention":        {[]string{someURL, "--retention-hours=0"}, "--retention-hours is 0"},
		"no shards":           {[]string{someURL, "--history-shards=0"}, "--history-shards is 0"},
		"unknown level":       {[]string{someURL, "--log-level=loud"}, `"loud"`},
		"an argument":         {[]string{someURL, "start"}, `"start"`},
		"an unknown flag":     {[]string{someURL, "--nonsense"}, "nonsense"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseSettings(test.args, io.Discard)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("the error is %v, want one with %q", err, test.want)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("the error tells the password: %v", err)
			}
		})
	}
}

func TestHelpTellsUnitsAndDefaults(t *testing.T) {
	var help strings.Builder
	if _, err := parseSettings([]string{"--help"}, &help); !errors.Is(err, flag.ErrHelp) {
		t.Fatalf("asking for help gives %v", err)
	}
	for _, part := range []string{"-retention-hours hours", "default 72", `default "127.0.0.1:0"`, "-batch-commits", "-address-file path"} {
		if !strings.Contains(help.String(), part) {
			t.Errorf("the help does not say %q:\n%s", part, help.String())
		}
	}
}

// What somebody puts into the URL has to reach the driver, for every database
// and for sessions of both kinds.
func TestPostgresURLReachesTheDriver(t *testing.T) {
	for name, test := range map[string]struct {
		url, user, password, host string
		port                      uint16
	}{
		"tcp":     {"postgres://ann:plain@127.0.0.1:6543/", "ann", "plain", "127.0.0.1", 6543},
		"socket":  {"postgres://ann@/?host=%2Frun%2Fmy%20socket&port=5433", "ann", "", "/run/my socket", 5433},
		"escapes": {"postgres://a%40b:p%20w%2F%3F%26%25%2B@127.0.0.1:6543/", "a@b", "p w/?&%+", "127.0.0.1", 6543},
		"no port": {"postgres://ann@127.0.0.1/", "ann", "", "127.0.0.1", 5432},
		"ipv6":    {"postgres://ann@[::1]:6543/", "ann", "", "::1", 6543},
	} {
		t.Run(name, func(t *testing.T) {
			for _, variable := range []string{"PGPASSWORD", "PGPORT", "PGPASSFILE"} {
				t.Setenv(variable, "")
			}
			parsed, err := parsePostgresURL(test.url)
			if err != nil {
				t.Fatal(err)
			}
			for commits, address := range map[string]*url.URL{"": parsed, "off": withoutWaiting(parsed)} {
				got, err := pgx.ParseConfig(databaseURL(address, mainDatabase))
				if err != nil {
					t.Fatal(err)
				}
				if got.User != test.user || got.Password != test.password || got.Host != test.host || got.Port != test.port || got.Database != mainDatabase {
					t.Errorf("the driver gets user %q, password %q, host %q, port %d, database %q",
						got.User, got.Password, got.Host, got.Port, got.Database)
				}
				if got.RuntimeParams["synchronous_commit"] != commits {
					t.Errorf("synchronous_commit is %q, want %q", got.RuntimeParams["synchronous_commit"], commits)
				}
			}
		})
	}
}
