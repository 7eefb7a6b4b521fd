package main

import (
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// settings are the validated command line flags.
type settings struct {
	postgres        *url.URL
	frontendAddress string // host:port; port 0 asks for a free one
	namespace       string
	retention       time.Duration
	addressFile     string
	logLevel        string
	historyShards   int
	batchCommits    bool
}

// logLevels are the levels that the server's logger knows.
var logLevels = []string{"debug", "info", "warn", "error"}

// parseSettings reads the flags and refuses values that the server would
// otherwise only trip over half-way through its start.
func parseSettings(args []string, errOut io.Writer) (settings, error) {
	flags := flag.NewFlagSet("holdfast-temporal", flag.ContinueOnError)
	flags.SetOutput(errOut)
	flags.Usage = func() {
		fmt.Fprint(errOut, "holdfast-temporal runs a Temporal development server whose state is kept in Postgres.\n"+
			"It listens on loopback only. It stops within "+strconv.Itoa(stopLimitSeconds)+" s on SIGTERM or SIGINT, and when its\n"+
			"standard input is a pipe and the other end closes it (the parent died).\n\nFlags:\n")
		flags.PrintDefaults()
	}
	postgresURL := flags.String("postgres-url", "",
		"`URL` of the Postgres server, without a database name: postgres://user:password@127.0.0.1:5432/ or, for a\n"+
			"unix socket, postgres://user@/?host=/socket/directory. The user needs CREATEDB (required, no default)")
	frontend := flags.String("frontend-address", "127.0.0.1:0", "loopback `host:port` of the gRPC frontend; port 0 chooses a free one")
	namespace := flags.String("namespace", "holdfast", "`name` of the namespace, registered when absent")
	retentionHours := flags.Int("retention-hours", 72, "`hours` for which closed workflows stay readable, at least 1")
	addressFile := flags.String("address-file", "", "`path` of a file that receives the frontend's host:port, written in one step once the server serves (default none)")
	logLevel := flags.String("log-level", "warn", "lowest `level` written to standard error: "+strings.Join(logLevels, ", "))
	historyShards := flags.Int("history-shards", 4, "`count` of history shards; fixed when the databases are created, ignored afterwards")
	batchCommits := flags.Bool("batch-commits", false, "wait for the disk once before each reply instead of at every commit; nothing that was replied is lost, provided\n"+
		"that Postgres does not restart under this process (set restart_after_crash=off and end both together)")
	if err := flags.Parse(args); err != nil {
		return settings{}, err
	}
	if flags.NArg() > 0 {
		return settings{}, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}

	postgres, err := parsePostgresURL(*postgresURL)
	if err != nil {
		return settings{}, err
	}
	if err := checkLoopback(*frontend); err != nil {
		return settings{}, err
	}
	if *namespace == "" {
		return settings{}, fmt.Errorf("--namespace is empty")
	}
	if *retentionHours < 1 || *retentionHours > 24*365 {
		return settings{}, fmt.Errorf("--retention-hours is %d, must be between 1 and %d", *retentionHours, 24*365)
	}
	if *historyShards < 1 || *historyShards > 512 {
		return settings{}, fmt.Errorf("--history-shards is %d, must be between 1 and 512", *historyShards)
	}
	if !slices.Contains(logLevels, *logLevel) {
		return settings{}, fmt.Errorf("--log-level is %q, must be one of %s", *logLevel, strings.Join(logLevels, ", "))
	}
	return settings{
		postgres:        postgres,
		frontendAddress: *frontend,
		namespace:       *namespace,
		retention:       time.Duration(*retentionHours) * time.Hour,
		addressFile:     *addressFile,
		logLevel:        *logLevel,
		historyShards:   *historyShards,
		batchCommits:    *batchCommits,
	}, nil
}

// parsePostgresURL checks what can be checked without connecting.
func parsePostgresURL(text string) (*url.URL, error) {
	if text == "" {
		return nil, fmt.Errorf("--postgres-url is required")
	}
	parsed, err := url.Parse(text)
	if err != nil {
		// The parser's error repeats the URL and with it the password.
		return nil, fmt.Errorf("--postgres-url is not a URL")
	}
	if parsed.Scheme != "postgres" && parsed.Scheme != "postgresql" {
		return nil, fmt.Errorf("--postgres-url has scheme %q, must be postgres", parsed.Scheme)
	}
	if strings.Trim(parsed.Path, "/") != "" {
		return nil, fmt.Errorf("--postgres-url names database %q, but the server creates databases of its own: leave the path empty",
			strings.Trim(parsed.Path, "/"))
	}
	if parsed.User == nil || parsed.User.Username() == "" {
		return nil, fmt.Errorf("--postgres-url names no user")
	}
	if parsed.Hostname() == "" && parsed.Query().Get("host") == "" {
		return nil, fmt.Errorf("--postgres-url names neither a host nor a socket directory (?host=/directory)")
	}
	return parsed, nil
}

// checkLoopback refuses addresses that other machines could reach: the server
// authenticates nobody.
func checkLoopback(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("--frontend-address %q is not host:port", address)
	}
	ip := net.ParseIP(host)
	if ip == nil || !ip.IsLoopback() {
		return fmt.Errorf("--frontend-address has host %q, must be a loopback address such as 127.0.0.1", host)
	}
	if number, err := strconv.Atoi(port); err != nil || number < 0 || number > 65535 {
		return fmt.Errorf("--frontend-address has port %q, must be between 0 and 65535", port)
	}
	return nil
}
