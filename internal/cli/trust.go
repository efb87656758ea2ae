package cli

import (
	"errors"
	"fmt"

	"gpu-cdi-plugin/internal/trust"
)

// Hints for a path that users other than root can change.
const (
	HintInsecure = "; --insecure-paths allows it, for work from a source tree"
	HintUnsafe   = "give it and the directories above it to root (chown root:root, chmod go-w), or name another"
)

// CheckPath returns an error if users other than root can change what a path leads to, which the function trusted
// checks. With --insecure-paths it logs a warning instead, once for each path. The libraries' own checks do not use
// CheckPath and have no such exception.
func (p *Program) CheckPath(trusted func(path string) error, path string) error {
	err := trusted(path)
	switch {
	case !errors.Is(err, trust.ErrUnsafe):
		return err
	case p.option("insecure-paths") != "true":
		return With(Failure, HintUnsafe+HintInsecure, err)
	}
	if _, before := p.warned.LoadOrStore(path, true); !before {
		p.Log.Warn("--insecure-paths is given: users who can change "+path+" can become root on this host",
			"error", err)
	}
	return nil
}

// CheckDir returns an error if users other than root can replace a directory or change what is in it. It does not
// check that the directory exists and is writable.
func (p *Program) CheckDir(name, path string) error {
	if err := p.CheckPath(trust.Dir, path); errors.Is(err, trust.ErrUnsafe) {
		return fmt.Errorf("%s %s is not used: %w", name, path, err)
	}
	return nil
}
