package doctor

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/wording"
)

// refreshFacts are what writes NVIDIA's spec: the service of its toolkit, and what starts that. It is the zero value if
// nothing starts the service, as when it is masked.
type refreshFacts struct {
	// unit is the file of the service or of its path unit.
	unit string
	// rule is the udev rule that starts the service at each load of the driver, or empty if an enabled unit does.
	rule string
	// stop is the command that keeps it from being started.
	stop string
}

// The units of NVIDIA's toolkit that write /var/run/cdi/nvidia.yaml, and its rule, of version 1.20 and later.
var (
	refreshUnits = []string{"nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"}
	refreshRule  = "*-nvidia-cdi-refresh.rules"
)

var (
	unitDirs = []string{"/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"}
	ruleDirs = []string{"/etc/udev/rules.d", "/run/udev/rules.d", "/usr/lib/udev/rules.d", "/lib/udev/rules.d"}
)

func (f *facts) readRefresh() {
	rule := f.firstOf(ruleDirs, refreshRule)
	var r refreshFacts
	var verbs []string
	for _, unit := range refreshUnits {
		file := f.firstOf(unitDirs, unit)
		byRule := rule != "" && path.Ext(unit) == ".service"
		switch {
		case file == "":
		case path.Dir(file) != unitDirs[0]:
			// Masked as well while it is disabled: an update of the toolkit enables or starts it.
			verbs = append(verbs, "systemctl mask --now "+unit)
		case byRule: // systemctl does not mask a unit of this directory
			verbs = append(verbs, "rm "+wording.Quote(f.onHost(file)), "systemctl daemon-reload", "systemctl mask --now "+unit)
		default:
			verbs = append(verbs, "systemctl disable --now "+unit)
		}
		if file != "" && (byRule || f.isEnabled(unit)) {
			r.unit = file
		}
		if file != "" && byRule {
			r.rule = rule
		}
	}
	if r.unit != "" {
		r.stop = strings.Join(verbs, " && ")
		f.refresh = r
	}
}

// firstOf returns the first file that a pattern matches in directories of systemd or udev, or "" if there is none or if
// it is masked. A file in an earlier directory replaces one of the same name in a later one.
func (f *facts) firstOf(dirs []string, pattern string) string {
	seen := map[string]bool{}
	for _, dir := range dirs {
		matches, _ := filepath.Glob(filepath.Join(f.at(dir), pattern)) // the patterns are right
		for _, at := range matches {
			name := filepath.Base(at)
			if seen[name] {
				continue
			}
			seen[name] = true
			info, err := os.Lstat(at)
			link, _ := os.Readlink(at) // of a file that is no link it is empty
			if err == nil && link != os.DevNull && (info.Size() > 0 || link != "") {
				return path.Join(dir, name)
			}
		}
	}
	return ""
}

// isEnabled reports whether a unit of systemd starts at a boot.
func (f *facts) isEnabled(unit string) bool {
	links, _ := filepath.Glob(f.at("/etc/systemd/system") + "/*.wants/" + unit) // the pattern is right
	return len(links) > 0
}

// writesSpecs reports whether this product is meant to write this host's spec: it has written one, it serves a kubelet,
// or one of its units is enabled.
func (f *facts) writesSpecs() bool {
	if slices.ContainsFunc(f.units, func(u unit) bool { return u.enabled }) {
		return true
	}
	for _, s := range f.kubelet.plugins {
		if s.isOurs() && s.state == live {
			return true
		}
	}
	return f.specs.hasOurs()
}

// checkRefresh says what writes NVIDIA's spec, if our own should be used, and which spec it is.
func checkRefresh(f *facts) []Finding {
	if f.CDIKind != cdi.DefaultKind || !f.writesSpecs() {
		return nil
	}
	var list []Finding
	if r := f.refresh; r.unit != "" {
		problem := "it is enabled, and writes /var/run/cdi/nvidia.yaml"
		if r.rule != "" {
			problem = r.rule + " starts it at each load of the driver, also if it is disabled, and it writes " +
				"/var/run/cdi/nvidia.yaml"
		}
		list = append(list, newFinding("nvidia-refresh", r.unit, problem).fixed(r.stop))
	}
	if f.specs.hasOurs() {
		return list
	}
	for i := range f.specs.files {
		if s := &f.specs.files[i]; s.kind == cdi.DefaultKind {
			problem := "another program wrote it, and it defines this host's GPUs, so that our service writes no spec"
			fix := f.without(s.path) + " && gpu-cdi-plugin cdi generate --write"
			list = append(list, newFinding("spec-foreign", s.path, problem).fixed(fix))
		}
	}
	return list
}

// without returns the command that removes another program's spec for good.
func (f *facts) without(file string) string {
	remove := "rm " + wording.Quote(file)
	if f.refresh.stop != "" {
		return f.refresh.stop + " && " + remove
	}
	return remove
}
