package environment

import (
	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/spec"
)

// Allowed says what tasks may name where they are run, so that a task which could
// only fail is refused before it runs.
type Allowed struct {
	// Access says which servers and credentials tasks may name.
	Access exchange.Access
	// Programs: tasks may name programs.
	Programs bool
}

// Check returns the first field of a task that names what is not allowed, or nil.
// Environment and scorer are nil where the task has none; path is the task's JSON path.
func (a Allowed) Check(e *spec.Environment, s *spec.Scorer, path string) *spec.FieldError {
	if e != nil {
		if refused := a.environment(e, path+".environment."+string(e.Kind)); refused != nil {
			return refused
		}
	}
	switch {
	case s == nil:
	case s.HTTP != nil:
		return a.server(s.HTTP.URL, s.HTTP.Credential, path+".scorer.http")
	case s.Program != nil:
		return a.program(path + ".scorer.program")
	}
	return nil
}

func (a Allowed) environment(e *spec.Environment, path string) *spec.FieldError {
	switch {
	case e.HTTP != nil:
		return a.server(e.HTTP.URL, e.HTTP.Credential, path)
	case e.MCP != nil && e.MCP.Program == nil:
		return a.server(e.MCP.URL, e.MCP.Credential, path)
	}
	return a.program(path + ".program")
}

func (a Allowed) server(address, credential, path string) *spec.FieldError {
	if err := a.Access.Address(address); err != nil {
		return &spec.FieldError{Path: path + ".url", Problem: err.Error() + "; the service's environments.allowed_hosts says which are"}
	}
	if _, err := a.Access.Credential(credential); err != nil {
		return &spec.FieldError{Path: path + ".credential", Problem: err.Error() + " in the service's environments.credentials"}
	}
	return nil
}

func (a Allowed) program(path string) *spec.FieldError {
	if a.Programs {
		return nil
	}
	return &spec.FieldError{Path: path, Problem: "the service runs no programs; its environments.commands_dir would say where"}
}
