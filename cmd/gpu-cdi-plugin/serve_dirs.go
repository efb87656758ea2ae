package main

import (
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/config"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/cli"
)

// optionDir is a directory that a daemon writes to, and the option that names it.
type optionDir struct{ option, path string }

// checkDirs returns an error if users other than root can change one of the directories that serve writes to, or if one
// of its own directories cannot be written to. A full disk is only logged, since containers can start with what is on
// it already.
func (a *app) checkDirs(log *slog.Logger) error {
	own := []optionDir{{"state-dir", a.descriptorDir()}}
	if len(a.plugin.Sharing.MPS.Resources) > 0 {
		own = append(own, optionDir{"runtime-dir", a.mpsDir()})
	}
	// MPS may come with a reload of the configuration.
	all := []optionDir{
		{"device-plugin-dir", a.plugin.DevicePluginDir}, {"state-dir", a.descriptorDir()}, {"runtime-dir", a.mpsDir()},
	}
	if a.servedSpec() != "" {
		all = append(all, optionDir{"cdi-dir", a.CDIDir})
	}
	if a.plugin.Registration == config.RegisterWatcher {
		all = append(all, optionDir{"plugins-registry-dir", a.plugin.PluginsRegistryDir})
	}
	var errs []error
	for _, d := range all {
		errs = append(errs, a.checkSafeDir(d))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, d := range own {
		errs = append(errs, checkDir(d.option, d.path, log))
	}
	return errors.Join(errs...)
}

func checkDir(option, dir string, log *slog.Logger) error {
	err := atomicfile.Check(dir)
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		log.Warn(option + " is full, and containers cannot be given devices until there is room: " + err.Error())
		return nil
	case err != nil:
		hint := fmt.Sprintf("name a directory that can be made and written to, with --%s, the same on the host", option)
		return cli.With(cli.Failure, hint, fmt.Errorf("%s: %w", option, err))
	}
	return nil
}
