// Package doctor examines a host: it reads the host's files, and says what is wrong with them, why that matters, and
// which command mends it. It changes nothing.
//
// It works in two steps. read reads the files of all subjects once, bounded in size and time, into facts. The checks
// are pure functions of the facts, one file for each subject. Whatever cannot be read becomes a note, so that nothing
// is taken as good unseen. A file that other programs wrote never ends the examination: if it is damaged, that is a
// finding.
//
// Try is apart from that: it starts a container with an engine, if the user asks for it.
package doctor

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wording"
)

// Severity says how bad a finding is.
type Severity string

// The severities. Errors and warnings are faults.
const (
	// Error means that some containers do not start or have no GPU.
	Error Severity = "error"
	// Warning means that it works for some containers or for now, or that containers can get more than they should.
	Warning Severity = "warning"
	// Note means that something could not be checked, or that it is good to know.
	Note Severity = "note"
)

// Finding is one thing that is wrong on the host.
type Finding struct {
	// ID names the kind of finding; docs/doctor.md lists them. It does not change between versions.
	ID       string   `json:"id"`
	Severity Severity `json:"severity"`
	// Subject is the file, device or program that the finding is about.
	Subject string `json:"subject"`
	Problem string `json:"problem"`
	// Why says what the problem causes.
	Why string `json:"why"`
	// Fix is the command or the change that mends it.
	Fix string `json:"fix"`
}

// IsFault reports whether the finding is more than a note.
func (f Finding) IsFault() bool { return f.Severity != Note }

// Options say which host is examined.
type Options struct {
	Host host.Host
	// CDIDir is the directory of our spec, and CDIKind its kind.
	CDIDir, CDIKind string
	// Hook is the path of prestart-hook, or empty if specs need none or it was not found, for the reason NoHook.
	Hook   string
	NoHook error
	// Capabilities are those of the written spec.
	Capabilities driver.Capabilities
	// PluginDir and RegistryDir are the kubelet's directories. PodResources is its socket, or empty if it is detected.
	PluginDir, RegistryDir, PodResources string
	// Watcher says that plugins register by RegistryDir.
	Watcher bool
	// ConfigFile is the configuration file of this product, and ConfigErr what is wrong with it. If it is empty, that of
	// the host is read.
	ConfigFile string
	ConfigErr  error
	// CheckConfig and CheckManagerConfig return what is wrong with the content of the configuration files of this program
	// and of device-manager.
	CheckConfig, CheckManagerConfig func([]byte) error
	// Systemd is the path of systemd's private socket.
	Systemd string
	// StateDir has the files of serve that must survive a reboot.
	StateDir string
	// Devices asks the driver for its devices. A driver without GPUs is no error.
	Devices func(context.Context) (*gpu.Snapshot, error)
	// Advice says what to do about an error of Devices.
	Advice func(error) string
	// TrustedFile, TrustedHook and TrustedDir check that only root can change a path. Their errors wrap trust.ErrUnsafe.
	TrustedFile, TrustedHook, TrustedDir func(path string) error
}

// facts are what was read of a host. A nil or empty field means that the host has no such thing.
type facts struct {
	Options
	driver  driverFacts
	specs   specFacts
	engines engineFacts
	kubelet kubeletFacts
	hooks   hookFacts
	kernel  kernelFacts
	own     ownFacts
	units   []unit
	configs []configFacts
	refresh refreshFacts
	notes   []Finding        // what could not be read
	dpkg    map[string][]int // the versions of packages, once read
	// processes has a PID for each name of a process, of at most 15 characters. It is nil if they are unknown.
	processes map[string]int
}

// checks are all checks, in the order of the subjects.
var checks = []func(*facts) []Finding{
	checkDriver, checkNodes, checkEngines, checkHooks, checkUnits, checkSpecs, checkRefresh, checkKubelet, checkOwn,
	checkKernel,
}

// Examine examines a host. The findings are sorted, errors first.
func Examine(ctx context.Context, o Options) []Finding {
	f := read(ctx, o)
	var list []Finding
	for _, check := range checks {
		list = append(list, check(f)...)
	}
	return Sort(append(list, f.notes...))
}

// read reads all facts. The order matters: a subject may use what was read before.
func read(ctx context.Context, o Options) *facts {
	f := &facts{Options: o}
	f.readKernel()
	f.readDriver(ctx)
	f.readKubelet(ctx)
	f.readEngines()
	f.readUnits(ctx)
	f.readSpecs()
	f.readHooks()
	f.readOwn()
	f.readRefresh()
	return f
}

// Sort sorts findings by severity, in their order otherwise, and removes those that say the same.
func Sort(list []Finding) []Finding {
	rank := map[Severity]int{Error: 0, Warning: 1, Note: 2}
	slices.SortStableFunc(list, func(a, b Finding) int { return cmp.Compare(rank[a.Severity], rank[b.Severity]) })
	seen := map[Finding]bool{}
	return slices.DeleteFunc(list, func(f Finding) bool {
		before := seen[f]
		seen[f] = true
		return before
	})
}

// unread notes that something could not be read.
func (f *facts) unread(subject string, err error) {
	f.notes = append(f.notes, newFinding("unchecked", subject, wording.Shorten(wording.OneLine(err), maxText)))
}

// maxText bounds texts that come from files, in bytes.
const maxText = 500

// newFinding returns a finding of the catalogue. {subject} in the fix stands for the subject.
func newFinding(id, subject, problem string) Finding {
	i := slices.IndexFunc(catalogue, func(k kind) bool { return k.id == id })
	k := catalogue[i]
	return Finding{
		ID: id, Severity: k.severity, Subject: subject, Problem: wording.Shorten(problem, maxText), Why: k.why,
		Fix: strings.ReplaceAll(k.fix, "{subject}", wording.Quote(subject)),
	}
}

// fixed returns the finding with another fix.
func (f Finding) fixed(fix string) Finding {
	if fix != "" {
		f.Fix = fix
	}
	return f
}
