package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/labels"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
)

// ownSpec returns the path of the CDI spec of the GPUs.
func ownSpec(c *config.Config) string { return filepath.Join(c.CDIDir, cdi.FileName(c.CDIKind)) }

// servedSpec returns the path of the GPUs' spec, or "" if containers get no CDI names.
func servedSpec(c *config.Config) string {
	uses := slices.Contains[[]resource.Strategy]
	if uses(c.Strategy, resource.CDICRI) || uses(c.Strategy, resource.CDIAnnotations) {
		return ownSpec(c)
	}
	return ""
}

// DescriptorDir returns the directory of the files that describe devices to containers.
func DescriptorDir(c *config.Config) string { return filepath.Join(c.StateDir, "devices") }

// HealthRecord returns the path of the record of the devices' health, which survives a restart and a reboot.
func HealthRecord(c *config.Config) string { return filepath.Join(c.StateDir, "health.json") }

// Preparations returns the path of the record of each device's last preparation for a container.
func Preparations(c *config.Config) string { return filepath.Join(c.StateDir, "prestart.json") }

// LabelsFile returns the path of the file with the node's labels.
func LabelsFile(c *config.Config) string { return filepath.Join(c.FeaturesDir, labels.FileName) }

// MPSDir returns the directory in which MPS control daemons have the directories that they share with their clients.
func MPSDir(c *config.Config) string { return filepath.Join(c.RuntimeDir, "mps") }

// NotWritableError means that a directory cannot be created or written to.
type NotWritableError struct {
	Option string // the name of the option that sets the directory
	Err    error
}

func (e *NotWritableError) Error() string { return fmt.Sprintf("%s: %v", e.Option, e.Err) }

func (e *NotWritableError) Unwrap() error { return e.Err }

// checkDirs returns an error if users other than root can change one of the directories to which serve writes, or if
// the service cannot write to one of its own directories. A full disk is only logged: containers can start with the
// files that exist.
func checkDirs(o *Options, log *slog.Logger) error {
	c := &o.Config
	watched := c.Registration == config.RegisterWatcher || c.Door != config.PluginDoor
	var errs []error
	for _, d := range []struct {
		option, path string
		used, own    bool
	}{
		{"device-plugin-dir", c.DevicePluginDir, true, false},
		{"state-dir", DescriptorDir(c), true, true},
		// A reload of the configuration may enable MPS.
		{"runtime-dir", MPSDir(c), true, len(c.Sharing.MPS.Resources) > 0},
		{"cdi-dir", c.CDIDir, servedSpec(c) != "", false},
		{"features-dir", c.FeaturesDir, c.NodeLabels, false},
		{"plugins-registry-dir", c.PluginsRegistryDir, watched, false},
	} {
		if !d.used {
			continue
		}
		err := o.Trust.CheckDir(d.option, d.path)
		if err == nil && d.own {
			err = checkWritable(d.option, d.path, log)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func checkWritable(option, dir string, log *slog.Logger) error {
	err := fileio.CheckWritable(dir)
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		log.Warn(option + " is full; containers get no devices until it has space: " + err.Error())
		return nil
	case err != nil:
		return &NotWritableError{option, err}
	}
	return nil
}
