package main

import (
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/cli"
)

// checkDirs returns an error if users other than root can change one of the directories that serve writes to, or if one
// of its own directories cannot be written to. A full disk is only logged, since containers can start with what is on
// it already.
func (a *app) checkDirs(log *slog.Logger) error {
	var errs []error
	for _, d := range []struct {
		option, path string
		used, own    bool
	}{
		{"device-plugin-dir", a.plugin.DevicePluginDir, true, false},
		{"state-dir", a.descriptorDir(), true, true},
		{"runtime-dir", a.mpsDir(), true, false},
		{"cdi-dir", a.CDIDir, a.servedSpec() != "", false},
		{"plugins-registry-dir", a.plugin.PluginsRegistryDir, a.plugin.Registration == config.RegisterWatcher, false},
	} {
		if !d.used {
			continue
		}
		err := a.CheckDir(d.option, d.path)
		if err == nil && d.own {
			err = checkWritable(d.option, d.path, log)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func checkWritable(option, dir string, log *slog.Logger) error {
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
