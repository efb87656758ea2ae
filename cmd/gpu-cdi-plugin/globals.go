package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu-cdi-plugin/config"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/near"
	"gpu-cdi-plugin/nvml"
)

// globals are the options of all verbs.
type globals struct {
	config.Common
	// Config is the path of the configuration file, or empty.
	Config string
}

var defaultGlobals = globals{Common: config.Default().Common}

var logLevels = map[string]slog.Level{
	"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
}

func (a *app) addFlags(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	text := func(value *string, name string) { f.StringVar(value, name, *value, config.Usage(name)) }
	text(&a.Root, "root")
	text(&a.DriverRoot, "driver-root")
	text(&a.DevRoot, "dev-root")
	text(&a.NVMLLibrary, "nvml-library")
	text(&a.CDIDir, "cdi-dir")
	text(&a.CDIKind, "cdi-kind")
	text(&a.HookPath, "hook-path")
	f.BoolVar(&a.InsecurePaths, "insecure-paths", a.InsecurePaths, config.Usage("insecure-paths"))
	f.Var(&choice{&a.LogLevel, config.LogLevels()}, "log-level", config.Usage("log-level"))
	f.Var(&choice{&a.LogFormat, config.LogFormats()}, "log-format", config.Usage("log-format"))
	f.StringVar(&a.Config, "config", "", "YAML `file` with these options and those of the device plugin")
	completeDirs(cmd, "root", "driver-root", "dev-root", "cdi-dir")
	completeChoices(cmd, f, "log-level", "log-format")
	_ = cmd.MarkPersistentFlagFilename("config", "yaml", "yml")
}

// host returns the paths of the host's files. What is not configured is detected: with --nvml-library and no
// --driver-root the driver is installed where that library is, its other libraries are searched for beside NVML's, and
// the device nodes are in the driver's root if only that has them, as in a driver container.
func (g *globals) host() (host.Host, error) {
	h, err := host.New(g.Root, g.DriverRoot, g.DevRoot)
	if err != nil {
		return host.Host{}, fmt.Errorf("locate the host's files: %w", err)
	}
	library := g.NVMLLibrary
	if library == "" {
		library, _ = nvml.Find(h, "") // opening the library reports the error
	}
	if library != "" {
		if library, err = filepath.Abs(library); err != nil {
			return host.Host{}, fmt.Errorf("locate the driver's library: %w", err)
		}
		if g.NVMLLibrary != "" && g.DriverRoot == "" {
			h = h.WithLibrary(library)
		} else {
			h = h.WithLibraries(filepath.Dir(library))
		}
	}
	if under := h.WithDevRoot(h.DriverRoot()); g.DevRoot == "" && !hasNodes(h) && hasNodes(under) {
		h = under
	}
	return h, nil
}

// hasNodes reports whether the driver's device nodes exist.
func hasNodes(h host.Host) bool {
	_, err := os.Lstat(h.Dev("nvidiactl"))
	return err == nil
}

const envPrefix = "GPU_CDI_"

// envName returns the environment variable of a flag: GPU_CDI_CDI_DIR for cdi-dir.
func envName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// environment returns the variables that begin with envPrefix. The last one wins if there are several, as in exec.
func environment(env []string) map[string]string {
	ours := map[string]string{}
	for _, kv := range env {
		if name, value, ok := strings.Cut(kv, "="); ok && strings.HasPrefix(name, envPrefix) {
			ours[name] = value
		}
	}
	return ours
}

// warnUnknownEnv logs the variables that begin with envPrefix but are no option: most often a misspelt one.
func (a *app) warnUnknownEnv(flags *pflag.FlagSet) {
	unknown := environment(a.env)
	var known []string
	flags.VisitAll(func(f *pflag.Flag) {
		delete(unknown, envName(f.Name))
		known = append(known, envName(f.Name))
	})
	for _, name := range sortedKeys(unknown) {
		a.log.Warn("the environment variable " + name + " is ignored, since no option has this name" +
			near.Question(name, known))
	}
}
