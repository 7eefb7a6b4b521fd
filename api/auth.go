package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
)

// Role is the closed set of what a caller may be.
type Role string

// Roles. Each operation names the roles that may call it; see docs/api.md.
const (
	// RoleViewer reads.
	RoleViewer Role = "viewer"
	// RoleTrainer reads, opens runs, submits batches, consumes samples, cancels,
	// and registers the engines that belong to it.
	RoleTrainer Role = "trainer"
	// RoleOperator reads, manages instances, cancels sessions and ends runs.
	RoleOperator Role = "operator"
)

// Sets of roles that operations name.
var (
	anyone     = []Role{RoleViewer, RoleTrainer, RoleOperator}
	trainers   = []Role{RoleTrainer}
	caretakers = []Role{RoleTrainer, RoleOperator}
)

// minSecretBytes keeps out tokens that can be guessed.
const minSecretBytes = 16

// Token is one bearer token that is accepted.
type Token struct {
	// Name stands in logs in the token's place.
	Name string
	Role Role
	// Secret is what callers send, at least 16 bytes of printable ASCII.
	Secret string
}

// String hides the secret.
func (t Token) String() string { return fmt.Sprintf("%s (%s)", t.Name, t.Role) }

func validateTokens(tokens []Token) error {
	seen := make(map[string]string, len(tokens))
	for i, token := range tokens {
		name := fmt.Sprintf("token %d (%s)", i, token.Name)
		if token.Name == "" {
			return fmt.Errorf("token %d: a name is required, since logs show it", i)
		}
		if !slices.Contains(anyone, token.Role) {
			return fmt.Errorf("%s: role must be viewer, trainer or operator, is %q", name, token.Role)
		}
		if len(token.Secret) < minSecretBytes {
			return fmt.Errorf("%s: the secret must be at least %d bytes long", name, minSecretBytes)
		}
		if strings.ContainsFunc(token.Secret, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return fmt.Errorf("%s: the secret must be printable ASCII without spaces", name)
		}
		if other, again := seen[token.Secret]; again {
			return fmt.Errorf("%s: has the same secret as %s", name, other)
		}
		seen[token.Secret] = name
	}
	return nil
}

// caller is who sent a request.
type caller struct {
	name string
	role Role
}

// doorkeeper tells who a request comes from.
type doorkeeper struct {
	callers []caller
	digests [][sha256.Size]byte
	// loopbackOnly: without tokens, requests must name this machine as their
	// host, or a page in a browser here could reach the service under a name of
	// its own that resolves to 127.0.0.1.
	loopbackOnly bool
}

func newDoorkeeper(tokens []Token, allowOpen bool) *doorkeeper {
	d := &doorkeeper{loopbackOnly: len(tokens) == 0 && !allowOpen}
	for _, token := range tokens {
		d.callers = append(d.callers, caller{name: token.Name, role: token.Role})
		d.digests = append(d.digests, sha256.Sum256([]byte(token.Secret)))
	}
	return d
}

// admit returns the caller, or the problem to answer with. roles are those that
// may pass.
func (d *doorkeeper) admit(r *http.Request, roles []Role) (caller, *problem) {
	if len(d.digests) == 0 {
		if d.loopbackOnly && !isLoopback(hostOf(r)) {
			return caller{}, newProblem(http.StatusForbidden, kindForbidden, fmt.Sprintf("without tokens only requests to this machine's own address are answered, not to %q", shorten(r.Host)))
		}
		return caller{name: "open"}, nil
	}
	secret, found := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !found {
		return caller{}, unauthorized("a bearer token is required: Authorization: Bearer <token>")
	}
	digest := sha256.Sum256([]byte(secret))
	match := -1
	for i := range d.digests {
		// Compare with all of them, so that time tells nothing.
		if subtle.ConstantTimeCompare(digest[:], d.digests[i][:]) == 1 {
			match = i
		}
	}
	if match < 0 {
		return caller{}, unauthorized("the bearer token is not known")
	}
	who := d.callers[match]
	if !slices.Contains(roles, who.role) {
		return who, newProblem(http.StatusForbidden, kindForbidden, fmt.Sprintf("role %s may not do this; it takes %s", who.role, joinRoles(roles)))
	}
	return who, nil
}

func unauthorized(detail string) *problem {
	p := newProblem(http.StatusUnauthorized, kindUnauthorized, detail)
	p.header = http.Header{"Www-Authenticate": {`Bearer realm="holdfast"`}}
	return p
}

func hostOf(r *http.Request) string {
	if host, _, err := net.SplitHostPort(r.Host); err == nil {
		return host
	}
	return strings.Trim(r.Host, "[]")
}

func joinRoles(roles []Role) string {
	names := make([]string, len(roles))
	for i, role := range roles {
		names[i] = string(role)
	}
	return strings.Join(names, " or ")
}
