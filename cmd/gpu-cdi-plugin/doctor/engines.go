package doctor

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"gpu-cdi-plugin/hook/install"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wording"
)

// engineFacts are the engines of the host.
type engineFacts struct {
	list []engine
	// ignoresImages says that NVIDIA's runtime is configured to take no GPUs from the environment of unprivileged
	// containers.
	ignoresImages bool
	// dockerHook is the program by which docker's --gpus works, or empty.
	dockerHook string
	// elsewhere are files of containerd in distributions of Kubernetes, which are not read.
	elsewhere []string
}

// engine is an engine whose program the host has.
type engine struct {
	name, program string
	// version is what is known of its version: the major number, or all numbers. It is empty if nothing is.
	version []int
	// settings are what its files say, or nil because of err.
	settings *install.Settings
	err      error
	// cdi is the highest version of specs that it can read, or nil if that is unknown.
	cdi []int
	// missing are the runtimes in its files whose programs do not exist, by name.
	missing map[string]string
}

// packages are the names of the engines' packages in Debian and Ubuntu, and those of the makers.
var packages = map[string][]string{
	"podman": {"podman"}, "docker": {"docker-ce", "docker.io", "moby-engine"},
	"containerd": {"containerd", "containerd.io", "moby-containerd"}, "crio": {"cri-o"},
	"kubelet": {"kubelet"},
}

// otherContainerd are the files of containerd that distributions of Kubernetes bring with them.
var otherContainerd = []string{
	"/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
	"/etc/k0s/containerd.toml", "/var/snap/microk8s/current/args/containerd.toml",
	"/etc/cri/conf.d/cri.toml", // Talos
}

func (f *facts) readEngines() {
	for _, e := range install.Engines() {
		program := f.program(e.Program)
		if program == "" {
			continue
		}
		found := engine{name: e.Name, program: program, version: f.versionOf(e.Name, program)}
		found.cdi = f.cdiOf(&found)
		files, err := install.Read(f.Host.Root(), []string{e.Name}, "")
		if err == nil {
			found.settings, err = files.Settings(e.Name)
		}
		switch {
		case errors.Is(err, fs.ErrPermission):
			f.unread("the configuration of "+e.Name, err)
			continue
		case err != nil:
			found.settings, found.err = nil, err
		default:
			found.missing = f.missingRuntimes(found.settings)
		}
		f.engines.list = append(f.engines.list, found)
	}
	for _, file := range otherContainerd {
		if f.exists(file) {
			f.engines.elsewhere = append(f.engines.elsewhere, file)
		}
	}
	f.engines.ignoresImages = ignoresImages(f.read("/etc/nvidia-container-runtime/config.toml"))
	for _, name := range []string{"nvidia-cdi-hook", "nvidia-container-runtime-hook"} {
		if f.program(name) != "" {
			f.engines.dockerHook = name
		}
	}
}

// missingRuntimes returns the runtimes whose program does not exist: at its path, or by its name in the usual
// directories of programs.
func (f *facts) missingRuntimes(s *install.Settings) map[string]string {
	missing := map[string]string{}
	for name, program := range s.Runtimes {
		if program != "" && f.program(program) == "" {
			missing[name] = program
		}
	}
	return missing
}

// ignoresImages reads the configuration of NVIDIA's runtime.
func ignoresImages(config []byte) bool {
	c, _ := install.ParseTOML("the configuration of NVIDIA's runtime", config)
	accepts, isSet := c["accept-nvidia-visible-devices-envvar-when-unprivileged"].(bool)
	return isSet && !accepts
}

// versionOf returns what is known of the version of a program without running it: from the list of Debian's packages if
// the program can be of one, and otherwise what Go has written into the program.
func (f *facts) versionOf(name, program string) []int {
	if f.dpkg == nil {
		f.dpkg = parseDPKG(f.read("/var/lib/dpkg/status"))
	}
	for _, name := range packages[name] {
		if version := f.dpkg[name]; version != nil && !strings.HasPrefix(program, "/usr/local/") {
			return version
		}
	}
	info, err := os.Stat(f.at(program))
	if err != nil || !info.Mode().IsRegular() {
		return nil
	}
	build, err := buildinfo.ReadFile(f.at(program))
	if err != nil {
		return nil
	}
	return goVersion(build.Main.Path, build.Main.Version)
}

// majorVersion matches the path of a Go module with a major version.
var majorVersion = regexp.MustCompile(`/v([0-9]+)$`)

// goVersion returns the version of a program whose main package is in a Go module: all numbers, or only the first one
// if the module's path has that and the version is unknown.
func goVersion(module, version string) []int {
	if module == "github.com/moby/moby/v2" {
		return []int{29} // docker 29 and later
	}
	if numbers := parseVersion(strings.TrimPrefix(version, "v")); numbers != nil && numbers[0] > 0 {
		return numbers
	}
	if m := majorVersion.FindStringSubmatch(module); m != nil {
		return parseVersion(m[1])
	}
	if module == "github.com/containerd/containerd" {
		return []int{1}
	}
	return nil
}

// parseDPKG returns the versions of the installed packages in dpkg's status file.
func parseDPKG(status []byte) map[string][]int {
	versions := map[string][]int{}
	for entry := range strings.SplitSeq(string(status), "\n\n") {
		fields := map[string]string{}
		for line := range strings.Lines(entry) {
			if key, value, ok := strings.Cut(line, ": "); ok {
				fields[key] = strings.TrimSpace(value)
			}
		}
		_, version, hasEpoch := strings.Cut(fields["Version"], ":")
		if !hasEpoch {
			version = fields["Version"]
		}
		if strings.HasSuffix(fields["Status"], " installed") {
			versions[fields["Package"]] = parseVersion(version)
		}
	}
	return versions
}

// leadingVersion matches the numbers with which a version begins.
var leadingVersion = regexp.MustCompile(`^[0-9]+(\.[0-9]+)*`)

// parseVersion returns the numbers with which a version begins, or nil.
func parseVersion(text string) []int {
	version, err := host.ParseVersion(leadingVersion.FindString(text))
	if err != nil {
		return nil
	}
	return version
}

// versionText formats a version.
func versionText(version []int) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(version), " ", "."), "[]")
}

// before reports whether a version is known to be before another one. Of a version that has only a major number, the
// rest is not known.
func before(version []int, other ...int) bool {
	if len(version) == 1 {
		return version[0] < other[0]
	}
	return len(version) > 0 && slices.Compare(version, other) < 0
}

// isSince reports whether a version is known not to be before another one.
func isSince(version []int, other ...int) bool {
	if len(version) == 1 {
		return version[0] > other[0] || version[0] == other[0] && other[1] == 0
	}
	return len(version) > 0 && slices.Compare(version, other) >= 0
}

func checkEngines(f *facts) []Finding {
	var list []Finding
	for i := range f.engines.list {
		e := &f.engines.list[i]
		if e.name == "containerd" && !f.usesContainerd(e) {
			continue
		}
		if e.err != nil {
			list = append(list, newFinding("engine-config", e.name, wording.OneLine(e.err)))
			continue
		}
		if e.settings.Elsewhere != "" {
			problem := e.name + " reads this file, and it was not examined"
			list = append(list, newFinding("unchecked", e.settings.Elsewhere, problem))
			continue
		}
		list = append(list, e.checkCDI()...)
		list = append(list, f.checkSpecDirs(e)...)
		list = append(list, f.checkSpecVersions(e)...)
		list = append(list, f.checkDevices(e)...)
		list = append(list, f.checkRuntimes(e)...)
		list = append(list, e.checkPIDs()...)
		if e.name == "docker" && f.engines.dockerHook == "" {
			list = append(list, newFinding("docker-gpus", "docker", "docker's option --gpus needs nvidia-cdi-hook or "+
				"nvidia-container-runtime-hook, and neither is installed"))
		}
	}
	list = append(list, f.checkNerdctl()...)
	for _, file := range f.engines.elsewhere {
		problem := "this configuration of containerd, of a distribution of Kubernetes, was not examined"
		list = append(list, newFinding("unchecked", file, problem))
	}
	return list
}

// usesContainerd reports whether something requests containers by containerd's CRI plugin, which has the settings.
// docker and nerdctl do not.
func (f *facts) usesContainerd(e *engine) bool {
	k := &f.kubelet
	byCrictl := f.program("crictl") != "" && f.program("crio") == ""
	if e.settings != nil && e.settings.WithoutCRI != "" {
		return false
	}
	return (k.present || byCrictl) && !strings.Contains(k.endpoint, "crio") && len(f.engines.elsewhere) == 0
}

// cdiSupport is what the versions of an engine can do with CDI.
type cdiSupport struct {
	since     []int // the first version with CDI
	byDefault []int // the first version that has it on; nil if it cannot be turned off
	turnOn    string
}

var supports = map[string]cdiSupport{
	"podman": {[]int{4, 1}, nil, ""},
	"docker": {[]int{25, 0}, []int{28, 2}, `write "features": {"cdi": true} into /etc/docker/daemon.json, then: ` +
		`systemctl restart docker`},
	"containerd": {[]int{1, 7}, []int{2, 0}, `write enable_cdi = true below [plugins."io.containerd.grpc.v1.cri"], or ` +
		`in a file of version 3 below [plugins."io.containerd.cri.v1.runtime"], then: systemctl restart containerd`},
	"crio": {[]int{1, 23}, nil, ""},
}

// checkCDI checks whether the engine reads CDI specs.
func (e *engine) checkCDI() []Finding {
	support, s := supports[e.name], e.settings
	version := versionText(e.version)
	off := func(problem, fix string) []Finding {
		return []Finding{newFinding("cdi-off", e.name, problem).fixed(fix)}
	}
	switch {
	case before(e.version, support.since...):
		return off(fmt.Sprintf("version %s of %s does not know CDI", version, e.name), "install a newer version of "+e.name)
	case s.SpecDirs != nil && len(s.SpecDirs) == 0 && !e.ignoresSpecDirs():
		return off(s.SpecDirsFile+" has an empty list of CDI directories",
			"name the directories of CDI specs in "+s.SpecDirsFile+", and restart "+e.name)
	case support.byDefault == nil:
		return nil
	case s.CDI != nil && !*s.CDI:
		return off(s.CDIFile+" turns CDI off", support.turnOn)
	case s.CDI != nil || isSince(e.version, support.byDefault...) || s.Version > 2:
		return nil
	case before(e.version, support.byDefault...):
		return off(fmt.Sprintf("CDI is off by default in version %s of %s, and its configuration does not turn it on",
			version, e.name), support.turnOn)
	}
	problem := "the version of " + e.name + " is unknown, and its configuration does not say whether CDI is on"
	return []Finding{newFinding("cdi-unknown", e.name, problem).fixed("see what " + e.name + " --version prints; before " +
		versionText(support.byDefault) + ", " + support.turnOn)}
}

// checkSpecDirs checks whether the engine reads the directory of our specs.
func (f *facts) checkSpecDirs(e *engine) []Finding {
	dirs, file := e.settings.SpecDirs, e.settings.SpecDirsFile
	if len(dirs) == 0 || e.ignoresSpecDirs() {
		dirs, file = []string{"/etc/cdi", "/var/run/cdi"}, ""
	}
	return f.checkDirs(e.name, dirs, file)
}

// ignoresSpecDirs reports whether the engine is a podman before 5.5, which ignores cdi_spec_dirs.
func (e *engine) ignoresSpecDirs() bool { return e.name == "podman" && before(e.version, 5, 5) }

// checkDirs checks whether an engine that reads specs in some directories reads that of ours. The file has the setting.
func (f *facts) checkDirs(name string, dirs []string, file string) []Finding {
	reads := slices.ContainsFunc(dirs, func(dir string) bool { return isSameDir(f.at(dir), f.CDIDir) })
	if reads {
		return nil
	}
	problem := fmt.Sprintf("%s reads CDI specs in %s, and not in %s", name, strings.Join(dirs, ", "), f.CDIDir)
	fix := "write the spec into one of them, with --cdi-dir"
	if file != "" {
		fix += ", or name the directory in " + file
	}
	return []Finding{newFinding("spec-dir", f.CDIDir, problem).fixed(fix)}
}

// checkNerdctl checks where nerdctl reads specs, which it does itself.
func (f *facts) checkNerdctl() []Finding {
	const file = "/etc/nerdctl/nerdctl.toml"
	if f.program("nerdctl") == "" {
		return nil
	}
	config, err := install.ParseTOML(file, f.read(file))
	if err != nil {
		return []Finding{newFinding("engine-config", file, wording.OneLine(err))}
	}
	list, is := config["cdi_spec_dirs"].([]any)
	if !is {
		return f.checkDirs("nerdctl", []string{"/etc/cdi", "/var/run/cdi"}, "")
	}
	dirs := make([]string, len(list))
	for i, dir := range list {
		dirs[i] = fmt.Sprint(dir)
	}
	return f.checkDirs("nerdctl", dirs, file)
}

// cdiSince are the first versions of engines that can read specs of a version of CDI, from the go.mod of their
// releases: releases of the CDI library have the numbers of the specification.
var cdiSince = map[string][]struct{ engine, cdi []int }{
	"podman": {
		{[]int{4, 1}, []int{0, 5}},
		{[]int{4, 7}, []int{0, 6}},
		{[]int{5, 1}, []int{0, 7}},
		{[]int{5, 2}, []int{0, 8}},
		{[]int{5, 5}, []int{1, 0}},
	},
	"docker": {{[]int{25, 0}, []int{0, 6}}, {[]int{27, 0}, nil}},
	"containerd": {
		{[]int{1, 7}, []int{0, 5}},
		{[]int{1, 7, 12}, []int{0, 6}},
		{[]int{1, 7, 20}, []int{0, 7}},
		{[]int{2, 0}, []int{0, 8}},
		{[]int{2, 1}, []int{1, 0}},
	},
}

// cdiOf returns the highest version of specs that an engine can read: that of the CDI library that Go has written into
// the program, or what is known of the engine's version. It is nil if neither is known.
func (f *facts) cdiOf(e *engine) []int {
	if build, err := buildinfo.ReadFile(f.at(e.program)); err == nil {
		for _, module := range build.Deps {
			if path.Base(module.Path) == "container-device-interface" {
				numbers := parseVersion(strings.TrimPrefix(module.Version, "v"))
				return numbers[:min(2, len(numbers))]
			}
		}
	}
	var known []int
	for _, row := range cdiSince[e.name] {
		if isSince(e.version, row.engine...) {
			known = row.cdi
		}
	}
	return known
}

// checkSpecVersions finds specs with GPUs that are of a later version than an engine can read.
func (f *facts) checkSpecVersions(e *engine) []Finding {
	if e.cdi == nil {
		return nil
	}
	var list []Finding
	for i := range f.specs.files {
		s := &f.specs.files[i]
		if version := parseVersion(s.version); slices.Compare(version[:min(2, len(version))], e.cdi) > 0 {
			problem := fmt.Sprintf("it is of CDI version %s, and %s %s can read %s.0 and earlier", s.version, e.name,
				versionText(e.version), versionText(e.cdi))
			finding := newFinding("spec-version", s.path, problem)
			if !s.ours { // ours needs no late version
				finding = finding.fixed(f.without(s.path) + " && gpu-cdi-plugin cdi generate --write")
			}
			list = append(list, finding)
		}
	}
	return list
}

// checkDevices finds GPUs that an engine gives to each container.
func (f *facts) checkDevices(e *engine) []Finding {
	isGPU := func(device string) bool {
		return strings.HasPrefix(device, f.CDIKind+"=") || strings.HasPrefix(device, "nvidia.com/") ||
			strings.HasPrefix(device, "/dev/nvidia")
	}
	i := slices.IndexFunc(e.settings.Devices, isGPU)
	if i < 0 {
		return nil
	}
	problem := fmt.Sprintf("%s gives %s to each container that names no other device", e.settings.DevicesFile,
		e.settings.Devices[i])
	return []Finding{newFinding("default-devices", e.name, problem)}
}

// isSameDir reports whether two paths lead to one directory, or would if it existed.
func isSameDir(a, b string) bool {
	first, err := os.Stat(a)
	second, otherErr := os.Stat(b)
	if err == nil && otherErr == nil {
		return os.SameFile(first, second)
	}
	return canonical(a) == canonical(b)
}

// canonical returns a path with /run in place of /var/run, which is a link to it on most hosts.
func canonical(dir string) string {
	dir = path.Clean(dir)
	if rest, ok := strings.CutPrefix(dir, "/var/run/"); ok {
		return "/run/" + rest
	}
	return dir
}

// checkRuntimes checks the engine's runtimes, above all the default one.
func (f *facts) checkRuntimes(e *engine) []Finding {
	s := e.settings
	var list []Finding
	if install.IsRuntimeOfNVIDIA(f.Host.Root(), s.Program()) && !f.engines.ignoresImages {
		problem := fmt.Sprintf("%s makes %s the default runtime", s.DefaultFile, s.Program())
		list = append(list, newFinding("runtime-nvidia", e.name, problem))
	}
	for _, name := range sortedKeys(e.missing) {
		problem := fmt.Sprintf("the runtime %s of %s is %s, which does not exist", name, e.name, e.missing[name])
		finding := newFinding("runtime-missing", e.missing[name], problem)
		if name != s.Default {
			finding.Severity = Warning
		}
		list = append(list, finding)
	}
	return list
}

// leastPIDs is how many processes and threads a container must be allowed: the hook, which runs in the container's
// cgroup, is a Go program with several threads.
const leastPIDs = 11

func (e *engine) checkPIDs() []Finding {
	limit := e.settings.PIDsLimit
	if limit == nil || *limit <= 0 || *limit >= leastPIDs {
		return nil
	}
	problem := fmt.Sprintf("%s sets pids_limit to %d, and the hook needs %d", e.settings.PIDsFile, *limit, leastPIDs)
	return []Finding{newFinding("pids-limit", e.name, problem).fixed(
		fmt.Sprintf("set pids_limit in %s to %d or more", e.settings.PIDsFile, leastPIDs))}
}
