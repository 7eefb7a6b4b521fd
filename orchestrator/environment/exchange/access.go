package exchange

import (
	"net/url"
	"path"

	"holdfast/orchestrator/environment/failure"
)

// Access says which servers may be spoken to, and with which tokens. Tasks come
// from trainers and name servers; the operator says where that may lead.
type Access struct {
	// Credentials maps the names that tasks use to bearer tokens.
	Credentials map[string]string
	// AllowedHosts are patterns (path.Match) for host:port or host; empty means
	// every host.
	AllowedHosts []string
	// Closed allows no host at all.
	Closed bool
}

// Check tells whether the patterns are well-formed.
func (a Access) Check() error {
	for _, pattern := range a.AllowedHosts {
		if _, err := path.Match(pattern, ""); err != nil {
			return failure.New(failure.Refused, "reading the allowed host "+pattern, err)
		}
	}
	return nil
}

// Bearer allows an address and returns the token that a credential names; the
// empty credential names none. Errors are failure.Disabled.
func (a Access) Bearer(address, credential string) (string, error) {
	parsed, err := url.Parse(address)
	if err != nil {
		return "", failure.New(failure.Disabled, "", err)
	}
	if !a.allows(parsed) {
		return "", failure.Newf(failure.Disabled, "", "the host %s is not allowed", parsed.Host)
	}
	if credential == "" {
		return "", nil
	}
	bearer, ok := a.Credentials[credential]
	if !ok {
		return "", failure.Newf(failure.Disabled, "", "no credential is called %q", credential)
	}
	return bearer, nil
}

func (a Access) allows(address *url.URL) bool {
	if a.Closed {
		return false
	}
	for _, pattern := range a.AllowedHosts {
		for _, name := range []string{address.Host, address.Hostname()} {
			// A pattern that is none matches nothing.
			if match, _ := path.Match(pattern, name); match {
				return true
			}
		}
	}
	return len(a.AllowedHosts) == 0
}
