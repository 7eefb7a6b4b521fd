package exchange

import (
	"fmt"
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

// Bearer allows an address and returns the token that a credential names. Errors are
// failure.Disabled.
func (a Access) Bearer(address, credential string) (string, error) {
	if err := a.Address(address); err != nil {
		return "", failure.New(failure.Disabled, "", err)
	}
	bearer, err := a.Credential(credential)
	if err != nil {
		return "", failure.New(failure.Disabled, "", err)
	}
	return bearer, nil
}

// Address says why a server may not be spoken to, or nil.
func (a Access) Address(address string) error {
	parsed, err := url.Parse(address)
	if err != nil {
		return err
	}
	if !a.allows(parsed) {
		return fmt.Errorf("the host %s is not allowed", parsed.Host)
	}
	return nil
}

// Credential returns the token of that name; the empty name stands for no token.
func (a Access) Credential(name string) (bearer string, err error) {
	if name == "" {
		return "", nil
	}
	bearer, ok := a.Credentials[name]
	if !ok {
		return "", fmt.Errorf("no credential is called %q", name)
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
