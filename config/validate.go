package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"tags.cncf.io/container-device-interface/pkg/parser"

	"gpu-cdi-plugin/allocator"
)

// Validate reports everything that is wrong with the configuration, whatever the node has. Each message begins with the
// key.
func (c *Config) Validate() error {
	return errors.Join(c.Common.Validate(), c.Plugin.Validate())
}

// Validate reports everything that is wrong with the options for all verbs.
func (c *Common) Validate() error {
	return errors.Join(
		notEmpty("root", c.Root),
		notEmpty("cdi-dir", c.CDIDir),
		checkKind(c.CDIKind),
		known("log-level", c.LogLevel, LogLevels()),
		known("log-format", c.LogFormat, LogFormats()),
	)
}

// Validate reports everything that is wrong with what the device plugin is told.
func (p *Plugin) Validate() error {
	return errors.Join(
		notEmpty("device-plugin-dir", p.DevicePluginDir),
		notEmpty("plugins-registry-dir", p.PluginsRegistryDir),
		known("registration", string(p.Registration), Registrations()),
		checkMounted("runtime-dir", p.RuntimeDir),
		checkMounted("state-dir", p.StateDir),
		checkStrategies(p.Strategy),
		known("device-id-strategy", string(p.DeviceIDStrategy), DeviceIDStrategies()),
		checkAnnotationPrefix(p.CDIAnnotationPrefix),
		checkTimeout("gpu-timeout", p.GPUTimeout),
		checkListen(p.Listen),
		eachOnce("extras", p.Extras, Extras()),
		checkIMEX(&p.IMEX),
		checkAllocation(&p.Allocation),
		p.Config.Validate(),
	)
}

// LogLevels lists the levels of logging, and LogFormats the formats.
func LogLevels() []string { return []string{"debug", "info", "warn", "error"} }

// LogFormats lists the formats of logs.
func LogFormats() []string { return []string{"text", "json"} }

func notEmpty(key, value string) error {
	if value == "" {
		return fmt.Errorf("%s is empty", key)
	}
	return nil
}

// checkMounted is about a directory that containers get files of: the kubelet is told their paths.
func checkMounted(key, dir string) error {
	if !filepath.IsAbs(dir) {
		return fmt.Errorf("%s %q: want an absolute path, the same as on the host", key, dir)
	}
	return nil
}

// minTimeout is the shortest time that makes sense for a GPU, which may be busy.
const minTimeout = time.Second

func checkTimeout(key string, d Duration) error {
	if d < Duration(minTimeout) {
		return fmt.Errorf("%s %v: want %v or more", key, d, minTimeout)
	}
	return nil
}

func known(key, value string, list []string) error {
	if slices.Contains(list, value) {
		return nil
	}
	return fmt.Errorf("%s: unknown value %q; known are %s", key, value, strings.Join(list, ", "))
}

func checkKind(kind string) error {
	vendor, class := parser.ParseQualifier(kind)
	if err := cmp.Or(parser.ValidateVendorName(vendor), parser.ValidateClassName(class)); err != nil {
		return fmt.Errorf("cdi-kind %q: want VENDOR/CLASS, such as nvidia.com/gpu: %w", kind, err)
	}
	return nil
}

func checkStrategies(list []Strategy) error {
	if len(list) == 0 {
		return errors.New("strategy is empty; no container would get its devices")
	}
	return eachOnce("strategy", list, Strategies())
}

// prefixForm is a domain and the beginning of a name, which has 63 characters at most with what the plugin adds: its own
// name and 17 more.
var prefixForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?/([a-zA-Z0-9][-_.a-zA-Z0-9]{0,30})?$`)

func checkAnnotationPrefix(prefix string) error {
	if !prefixForm.MatchString(prefix) {
		return fmt.Errorf("cdi-annotation-prefix %q: want a domain and a slash, such as cdi.k8s.io/, and at most 31 characters behind it", prefix)
	}
	return nil
}

func eachOnce[T ~string](key string, list []T, values []string) error {
	var errs []error
	for i, s := range list {
		errs = append(errs, known(key, string(s), values))
		if slices.Contains(list[:i], s) {
			errs = append(errs, fmt.Errorf("%s: %s is there twice", key, s))
		}
	}
	return errors.Join(errs...)
}

func checkIMEX(x *IMEX) error {
	var errs []error
	for i, c := range x.Channels {
		if c < 0 || c > MaxChannel {
			errs = append(errs, fmt.Errorf("imex.channels: %d is not a number from 0 to %d", c, MaxChannel))
		}
		if slices.Contains(x.Channels[:i], c) {
			errs = append(errs, fmt.Errorf("imex.channels: %d is there twice", c))
		}
	}
	if x.Required && len(x.Channels) == 0 {
		errs = append(errs, errors.New("imex.required: there is no channel in imex.channels"))
	}
	return errors.Join(errs...)
}

func checkAllocation(a *Allocation) error {
	errs := []error{
		known("allocation.policy", string(a.Policy), allocator.Policies()),
		known("allocation.shared-policy", string(a.SharedPolicy), allocator.Policies()),
	}
	for key, weight := range a.Weights.All() {
		if weight < 0 || weight > allocator.MaxWeight {
			errs = append(errs, fmt.Errorf("allocation.weights.%s: %d is not a number from 0 to %d", key, weight, allocator.MaxWeight))
		}
	}
	return errors.Join(errs...)
}

// checkListen takes HOST:PORT. Without a host it would be open to the network, which is said with 0.0.0.0 or [::].
func checkListen(address string) error {
	if address == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("listen %q: want HOST:PORT, such as 127.0.0.1:9400: %w", address, err)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("listen %q: the port is not a number from 0 to 65535", address)
	}
	if host == "" {
		return fmt.Errorf("listen %q has no host; for all of the node's addresses say 0.0.0.0:%s or [::]:%s", address, port, port)
	}
	return nil
}
