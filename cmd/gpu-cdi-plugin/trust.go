package main

import (
	"errors"
	"fmt"
	"os"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/shellword"
	"gpu-cdi-plugin/internal/trust"
)

const (
	hintInsecure = "; --insecure-paths allows it, for work from a source tree"
	hintUnsafe   = "give it and the directories above it to root (chown root:root, chmod go-w), or name another"
)

// check applies a check of the package trust to a path. With --insecure-paths a path that others can change is not an
// error; it is logged once. The libraries' own checks, whose errors do not come from here, have no such exception.
func (a *app) check(trusted func(path string) error, path string) error {
	err := trusted(path)
	switch {
	case !errors.Is(err, trust.ErrUnsafe):
		return err
	case !a.InsecurePaths:
		return cli.With(cli.Failure, hintUnsafe+hintInsecure, err)
	}
	if _, before := a.warned.LoadOrStore(path, true); !before {
		a.log.Warn("--insecure-paths is given: users who can change "+path+" can become root on this host",
			"error", err)
	}
	return nil
}

// checkHook returns an error unless the hook can be executed and only root can change it: engines run it as root.
func (a *app) checkHook() error {
	path, err := a.hook()
	if err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return noHook(err)
	}
	if err := a.check(trust.RootFile, path); err != nil {
		hint := "copy the hook to where only root can write (install -D -m 755 " + path +
			" /usr/libexec/prestart-hook) and name the copy with --hook-path" + hintInsecure
		return cli.With(cli.Failure, hint, fmt.Errorf("the hook %s would run as root: %w", path, err))
	}
	if info.Mode()&0o111 == 0 {
		hint := "name the program prestart-hook with --hook-path, or make it executable: chmod 755 " + shellword.Quote(path)
		return cli.With(cli.Failure, hint, fmt.Errorf("the hook %s is not executable", path))
	}
	return nil
}

// checkLibrary returns an error unless only root can change the driver's library: it is loaded into this process.
func (a *app) checkLibrary(path string) error {
	if err := a.check(trust.File, path); err != nil {
		return fmt.Errorf("the driver's library %s is not loaded: %w", path, err)
	}
	return nil
}

// checkDriverRoot returns an error if others can change what is below the driver's root: containers get its files.
func (a *app) checkDriverRoot(h host.Host) error {
	return a.checkDir("the driver's root", h.DriverRoot())
}

// checkDir returns an error if others can change what is in a directory, or put another in its place. Whether it exists
// and can be written to is checked elsewhere.
func (a *app) checkDir(name, path string) error {
	if err := a.check(trust.Dir, path); errors.Is(err, trust.ErrUnsafe) {
		return fmt.Errorf("%s %s is not used: %w", name, path, err)
	}
	return nil
}

// unsafeParts returns the problems of a spec file that others can change, and of its hooks that are not trusted. A hook
// that does not exist is no such problem.
func (a *app) unsafeParts(file string, spec *specs.Spec, trustedHook func(path string) error) []cdi.Problem {
	var problems []cdi.Problem
	if err := a.check(trust.File, file); errors.Is(err, trust.ErrUnsafe) {
		problems = append(problems, cdi.Problem{Where: "spec", What: fmt.Sprintf("its hooks run as root, and %v", err)})
	}
	for _, path := range cdi.HookPaths(spec) {
		if err := a.check(trustedHook, path); errors.Is(err, trust.ErrUnsafe) {
			what := fmt.Sprintf("engines run it as root, and %v", err)
			problems = append(problems, cdi.Problem{Where: "hook " + path, What: what})
		}
	}
	return problems
}
