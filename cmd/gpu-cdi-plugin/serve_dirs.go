package main

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/exit"
)

// allocationDir has the files that tell containers what they were given.
func (a *app) allocationDir() string { return filepath.Join(a.plugin.StateDir, "allocations") }

// checkDirs says which of the directories that serve writes to while it runs cannot be written to, before a container
// is refused for it. A full disk is none of these: that passes, and what is on it already is served.
func (a *app) checkDirs(log *slog.Logger) error {
	errs := []error{checkDir("state-dir", a.allocationDir(), log)}
	if len(a.plugin.Sharing.MPS.Resources) > 0 {
		errs = append(errs, checkDir("runtime-dir", a.mpsDir(), log))
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
		return exit.With(exit.Failure, hint, fmt.Errorf("%s: %w", option, err))
	}
	return nil
}
