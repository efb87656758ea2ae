package config

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"tags.cncf.io/container-device-interface/pkg/parser"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/resource"
)

// Validate returns all problems of the configuration that can be found without the host. Each message begins with the
// key.
func (c *Config) Validate() error {
	return errors.Join(
		configfile.NotEmpty("root", c.Root),
		configfile.NotEmpty("cdi-dir", c.CDIDir),
		checkDriverDirs(c.DriverDirs),
		checkKind(c.CDIKind),
		known("log-level", c.LogLevel),
		known("log-format", c.LogFormat),
		configfile.NotEmpty("device-plugin-dir", c.DevicePluginDir),
		configfile.NotEmpty("plugins-registry-dir", c.PluginsRegistryDir),
		known("registration", c.Registration),
		known("door", c.Door),
		checkDRA(c),
		known("leave", c.Leave),
		configfile.Absolute("runtime-dir", c.RuntimeDir),
		configfile.Absolute("state-dir", c.StateDir),
		checkStrategies(c.Strategy),
		known("device-id-strategy", c.DeviceIDStrategy),
		checkAnnotationPrefix(c.CDIAnnotationPrefix),
		checkTimeout(c.GPUTimeout),
		checkHealth(&c.Health),
		knownOnce("report-health", c.ReportHealth),
		configfile.NotEmpty("service-account-dir", c.ServiceAccountDir),
		checkPreStart(&c.PreStart),
		checkReplicasGiven(c),
		checkListen(c.Listen),
		configfile.Absolute("features-dir", c.FeaturesDir),
		knownOnce("extras", c.Extras),
		checkIMEX(&c.IMEX),
		checkAllocation(&c.Allocation),
		c.Config.Validate(),
	)
}

func checkDriverDirs(dirs []string) error {
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, configfile.Absolute("driver-dirs", dir))
	}
	return errors.Join(errs...)
}

// minTimeout is the shortest timeout. A GPU that is busy may take that long to answer.
const minTimeout = time.Second

func checkTimeout(d configfile.Duration) error {
	if d < configfile.Duration(minTimeout) || d > configfile.Duration(maxWait) {
		return fmt.Errorf("gpu-timeout %v: want %v to %v", d, minTimeout, maxWait)
	}
	return nil
}

// maxWait is the longest time that a device may wait. A longer time is a mistake, such as h instead of s.
const maxWait = time.Hour

func checkWait(key string, d configfile.Duration) error {
	if d <= 0 || d > configfile.Duration(maxWait) {
		return fmt.Errorf("%s %v: want more than 0 and at most %v", key, d, maxWait)
	}
	return nil
}

func checkHealth(h *Health) error {
	errs := []error{checkWait("health.clean-for", h.CleanFor)}
	seen := map[int]bool{}
	for i, x := range h.XIDs {
		at := fmt.Sprintf("health.xids[%d]", i)
		switch {
		case x.XID < 1:
			errs = append(errs, fmt.Errorf("%s.xid %d: want a code of 1 or more", at, x.XID))
		case seen[x.XID]:
			errs = append(errs, fmt.Errorf("%s.xid %d: another rule has the same XID", at, x.XID))
		}
		seen[x.XID] = true
		errs = append(errs, configfile.OneOf(at+".action", x.Action, health.Actions()))
		if x.Count < 0 || x.Count > health.MaxCount {
			errs = append(errs, fmt.Errorf("%s.count %d: want 1 to %d", at, x.Count, health.MaxCount))
		}
		if (x.Count > 1) != (x.Within > 0) {
			errs = append(errs, fmt.Errorf("%s: want count (more than 1) and within together", at))
		}
	}
	return errors.Join(errs...)
}

func checkPreStart(p *PreStart) error {
	errs := []error{known("prestart.policy", p.Policy), checkWait("prestart.exec-timeout", p.ExecTimeout)}
	if p.MemoryToleranceMiB < 0 || p.MemoryToleranceMiB > maxToleranceMiB {
		errs = append(errs,
			fmt.Errorf("prestart.memory-tolerance-mib %d: want 0 to %d", p.MemoryToleranceMiB, maxToleranceMiB))
	}
	if p.Exec != "" && !filepath.IsAbs(p.Exec) {
		errs = append(errs, fmt.Errorf("prestart.exec %q: want an absolute path", p.Exec))
	}
	for i, name := range p.Programs {
		if name == "" || strings.ContainsFunc(name, func(r rune) bool { return r == '/' || unicode.IsControl(r) }) {
			errs = append(errs, fmt.Errorf("prestart.programs[%d] %q: want the name of an executable without its directory",
				i, name))
		}
	}
	seen := map[string]bool{}
	for i, r := range p.Resources {
		if err := kubelet.CheckResourceName(r.Name); err != nil {
			errs = append(errs, fmt.Errorf("prestart.resources[%d].name: %w", i, err))
		}
		if seen[r.Name] {
			errs = append(errs, fmt.Errorf("prestart.resources[%d].name %s: another entry has the same name", i, r.Name))
		}
		seen[r.Name] = true
		at := fmt.Sprintf("prestart.resources[%d].policy", i)
		errs = append(errs, configfile.OneOf(at, r.Policy, values["prestart.policy"]))
	}
	return errors.Join(errs...)
}

// checkReplicasGiven returns an error if there are replicas that no container could ever get.
func checkReplicasGiven(c *Config) error {
	var errs []error
	for _, name := range c.Sharing.Names() {
		if c.PreStart.RefusesParts(name) {
			errs = append(errs, fmt.Errorf("prestart.strict: every replica of %s would be refused, since the resource has "+
				"policy reset and a replica cannot be reset: give it another policy in prestart.resources", name))
		}
	}
	return errors.Join(errs...)
}

// maxToleranceMiB is more memory than a GPU has.
const maxToleranceMiB = 1 << 20

func known[T ~string](key string, value T) error { return configfile.OneOf(key, value, values[key]) }

func checkKind(kind string) error {
	vendor, class := parser.ParseQualifier(kind)
	if err := parser.ValidateVendorName(vendor); err != nil {
		return fmt.Errorf("cdi-kind %q: want VENDOR/CLASS, such as nvidia.com/gpu: %w", kind, err)
	}
	if err := parser.ValidateClassName(class); err != nil {
		return fmt.Errorf("cdi-kind %q: want VENDOR/CLASS, such as nvidia.com/gpu: %w", kind, err)
	}
	return nil
}

func checkStrategies(list []resource.Strategy) error {
	if len(list) == 0 {
		return errors.New("strategy is empty; containers would not get their devices")
	}
	return knownOnce("strategy", list)
}

// checkDRA returns an error unless claims can get their devices.
func checkDRA(c *Config) error {
	var errs []error
	if c.Door != PluginDoor && !slices.Contains(c.Strategy, resource.CDICRI) {
		errs = append(errs, fmt.Errorf("strategy: want %s with door %s, since containers with a claim get their devices by "+
			"CDI", resource.CDICRI, c.Door))
	}
	switch {
	case c.Door == BothDoors && len(c.DRAGPUs) == 0:
		errs = append(errs, errors.New("dra-gpus is empty: name the GPUs that DRA offers, or use another door"))
	case c.Door != BothDoors && len(c.DRAGPUs) > 0:
		errs = append(errs, fmt.Errorf("dra-gpus: it is used with door %s only", BothDoors))
	}
	for i, s := range c.DRAGPUs {
		if err := s.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("dra-gpus[%d]: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

// maxPrefixDomain is the longest domain, and maxPrefixName the longest beginning of a name. The plugin appends up to
// 32 characters, and a name may have 63.
const (
	maxPrefixDomain = 252
	maxPrefixName   = 31
)

func checkAnnotationPrefix(prefix string) error {
	domain, name, slash := strings.Cut(prefix, "/")
	valid := slash && kubelet.IsSubdomain(domain) && kubelet.IsName(name+"0") // with what the plugin appends
	if !valid || len(domain) > maxPrefixDomain || len(name) > maxPrefixName {
		return fmt.Errorf("cdi-annotation-prefix %q: want a domain and a slash, such as cdi.k8s.io/, "+
			"and at most 31 characters after it", prefix)
	}
	return nil
}

func knownOnce[T ~string](key string, list []T) error {
	var errs []error
	for i, s := range list {
		errs = append(errs, known(key, s))
		if slices.Contains(list[:i], s) {
			errs = append(errs, fmt.Errorf("%s: duplicate value %s", key, s))
		}
	}
	return errors.Join(errs...)
}

func checkIMEX(x *IMEX) error {
	var errs []error
	for i, c := range x.Channels {
		if c < 0 || c > maxChannel {
			errs = append(errs, fmt.Errorf("imex.channels: want numbers from 0 to %d, got %d", maxChannel, c))
		}
		if slices.Contains(x.Channels[:i], c) {
			errs = append(errs, fmt.Errorf("imex.channels: duplicate channel %d", c))
		}
	}
	if x.Required && len(x.Channels) == 0 {
		errs = append(errs, errors.New("imex.required: want a channel in imex.channels"))
	}
	return errors.Join(errs...)
}

func checkAllocation(a *Allocation) error {
	errs := []error{
		known("allocation.policy", a.Policy),
		known("allocation.shared-policy", a.SharedPolicy),
	}
	for key, weight := range a.Weights.All() {
		if weight < 0 || weight > allocator.MaxWeight {
			errs = append(errs, fmt.Errorf("allocation.weights.%s: want a number from 0 to %d, got %d",
				key, allocator.MaxWeight, weight))
		}
	}
	return errors.Join(errs...)
}

// checkListen returns an error unless the address is HOST:PORT. The host is required: otherwise the server could be
// open to the network by accident.
func checkListen(address string) error {
	if address == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("listen %q: want HOST:PORT, such as 127.0.0.1:9400", address)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("listen %q: want a port from 0 to 65535", address)
	}
	if host == "" {
		return fmt.Errorf("listen %q: want a host; use 0.0.0.0:%s or [::]:%s for all addresses of the node",
			address, port, port)
	}
	return nil
}
