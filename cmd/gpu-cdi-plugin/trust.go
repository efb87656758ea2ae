package main

import (
	"fmt"
	"os"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
)

// checkHook returns an error unless the hook can be executed and only root can change it, since engines run it as
// root.
func (a *app) checkHook() error {
	path, err := a.hook()
	if err != nil {
		return err
	}
	return a.checkHookAt(path)
}

func (a *app) checkHookAt(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return noHook(err)
	}
	if err := a.CheckPath(trust.RootFile, path); err != nil {
		hint := "copy the hook to where only root can write (install -D -m 755 " + path +
			" /usr/libexec/prestart-hook) and name the copy with --hook-path" + cli.HintInsecure
		return cli.With(cli.Failure, hint, fmt.Errorf("the hook %s would run as root: %w", path, err))
	}
	if info.Mode()&0o111 == 0 {
		hint := "name the program prestart-hook with --hook-path, or make it executable: chmod 755 " + wording.Quote(path)
		return cli.With(cli.Failure, hint, fmt.Errorf("the hook %s is not executable", path))
	}
	return nil
}

// checkLibrary returns an error unless only root can change the driver's library, since it is loaded into this
// process.
func (a *app) checkLibrary(path string) error {
	if err := a.CheckPath(trust.File, path); err != nil {
		return fmt.Errorf("the driver's library %s is not loaded: %w", path, err)
	}
	return nil
}

// checkDriverRoot returns an error if users other than root can change files below the driver's root, since containers
// get these files.
func (a *app) checkDriverRoot(h host.Host) error {
	return a.CheckDir("the driver's root", h.DriverRoot())
}

// unsafeParts returns a problem if users other than root can change a spec file, and one for each of its hooks that
// they can change.
func (a *app) unsafeParts(file string, spec *specs.Spec) []cdi.Problem {
	trusted := func(path string) error { return a.CheckPath(trust.File, path) }
	trustedHook := func(path string) error { return a.CheckPath(trust.RootFile, path) }
	return cdi.UnsafeParts(file, spec, trusted, trustedHook)
}
