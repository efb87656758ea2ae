package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
)

// specFacts are the CDI specs of the host.
type specFacts struct {
	dirs *cdi.SpecDirs
	// files are the specs of NVIDIA's devices that can be read.
	files []specFile
	// private are the spec files and directories that users other than root cannot read.
	private []string
	// unsafeDirs are the directories of specs that users other than root can change.
	unsafeDirs []string
	// renewed says that a service of systemd makes our spec again after a boot. It is also true without systemd.
	renewed bool
	// mounts are the properties of the file systems of directories that are written to.
	mounts []mountFacts
}

// specFile is a spec of NVIDIA's devices, and what is wrong with it.
type specFile struct {
	path, kind, version string
	ours                bool
	// unsafe are the parts that users other than root can change. differences are those between our spec and this
	// host, and problems what is wrong with any spec.
	unsafe                []cdi.Problem
	differences, problems []string
}

// uvmNode is the device node without which CUDA does not start.
const uvmNode = "/dev/nvidia-uvm"

// mountFacts is the file system of a directory.
type mountFacts struct {
	dir, option             string
	readOnly, noExec, tmpfs bool
}

func (f *facts) readSpecs() {
	s := &f.specs
	s.dirs = cdi.Load(cdi.Dirs(f.Host.Root(), f.CDIDir)...)
	for _, dir := range s.dirs.Dirs {
		if info, err := os.Stat(dir); err == nil && info.IsDir() && info.Mode().Perm()&0o005 != 0o005 {
			s.private = append(s.private, dir)
		}
		if err := f.TrustedDir(dir); errors.Is(err, trust.ErrUnsafe) {
			s.unsafeDirs = append(s.unsafeDirs, dir)
		}
	}
	for i := range s.dirs.Files {
		file := &s.dirs.Files[i]
		info, err := os.Stat(file.Path)
		if err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o004 == 0 {
			s.private = append(s.private, file.Path)
		}
		if file.Spec != nil && (cdi.WrittenHere(file.Spec) || cdi.NamesGPUs(file.Spec) ||
			strings.HasPrefix(file.Kind, "nvidia.com/")) {
			s.files = append(s.files, f.readSpec(file))
		}
	}
	s.renewed = !f.exists("/run/systemd/system")
	for i := range f.units {
		s.renewed = s.renewed || f.units[i].watches()
	}
	s.mounts = append(s.mounts, mountOf(f.StateDir, "state-dir"), mountOf(f.CDIDir, "cdi-dir"))
}

// readSpec compares a spec with the host.
func (f *facts) readSpec(file *cdi.SpecFile) specFile {
	s := specFile{path: file.Path, kind: file.Kind, version: file.Version, ours: cdi.WrittenHere(file.Spec)}
	s.unsafe = cdi.UnsafeParts(file.Path, file.Spec, f.TrustedFile, f.TrustedHook)
	if s.ours && file.Kind == f.CDIKind {
		s.differences = f.differences(file)
	}
	problems, err := cdi.ValidateFile(file.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.unread(file.Path, err)
	}
	if f.driver.devices != nil && cdi.NamesGPUs(file.Spec) {
		problems = append(problems, cdi.ValidateDevices(file.Spec, f.driver.devices)...)
	}
	if f.driver.loaded != "" {
		problems = append(problems, cdi.ValidateNumbers(file.Spec, driver.ReadNumbers(f.Host))...)
	}
	_, hasUVM := f.driver.nodes[uvmNode]
	for _, p := range problems {
		// The file's mode, its hook and a missing device node are findings of their own.
		isHook := strings.HasPrefix(p.What, "hook: ") && strings.Contains(p.What, f.Hook)
		isUVM := !hasUVM && strings.Contains(p.What, "without the device node "+uvmNode)
		if !strings.HasPrefix(p.What, "mode ") && !isHook && !isUVM {
			s.problems = append(s.problems, p.String())
		}
	}
	return s
}

// differences compares our spec with the one that this host should have, with the hook of the written one, if it has
// one: this program may be a copy that is elsewhere.
func (f *facts) differences(file *cdi.SpecFile) []string {
	d := &f.driver
	hooks := cdi.HookPaths(file.Spec)
	if d.devices == nil || len(d.devices.Devices) == 0 {
		return nil
	}
	o := cdi.Options{Kind: f.CDIKind, WithoutHooks: len(hooks) == 0, Capabilities: f.Capabilities}
	if !o.WithoutHooks {
		o.HookPath = hooks[0]
	}
	expected, _, err := cdi.Generate(d.devices, d.files, o)
	if err != nil {
		f.unread(file.Path, err)
		return nil
	}
	return differencesOf(file.Spec, expected, f.specs.dirs.Conflicts(file.Path, expected))
}

func differencesOf(written, expected *specs.Spec, conflicts []cdi.Conflict) []string {
	list := cdi.Diff(written, expected)
	if without := cdi.Without(expected, conflicts); len(list) > 0 && without != nil {
		list = cdi.Diff(written, without)
	}
	var texts []string
	for _, d := range list {
		texts = append(texts, d.String())
	}
	return texts
}

// mountOf returns the properties of the file system of a path, or of the first existing directory above it.
func mountOf(dir, option string) mountFacts {
	m := mountFacts{dir: dir, option: option}
	var st unix.Statfs_t
	for at := filepath.Clean(dir); ; at = filepath.Dir(at) {
		if err := unix.Statfs(at, &st); err == nil {
			m.readOnly, m.noExec = st.Flags&unix.ST_RDONLY != 0, st.Flags&unix.ST_NOEXEC != 0
			m.tmpfs = st.Type == unix.TMPFS_MAGIC
			return m
		}
		if at == filepath.Dir(at) {
			return m
		}
	}
}

func checkSpecs(f *facts) []Finding {
	s := &f.specs
	var list []Finding
	for _, file := range s.dirs.Files {
		if file.Error != "" {
			list = append(list, f.checkUnreadable(&file))
		}
	}
	list = append(list, f.checkConflicts()...)
	for _, dir := range s.unsafeDirs {
		list = append(list, newFinding("dir-unsafe", dir, "others can change it"))
	}
	for _, name := range s.private {
		list = append(list, newFinding("spec-private", name, "only root can read it"))
	}
	for i := range s.files {
		list = append(list, f.checkSpec(&s.files[i])...)
	}
	hasGPUs := f.driver.devices != nil && len(f.driver.devices.Devices) > 0
	if hasGPUs && len(s.files) == 0 && f.driver.files.Check(f.Capabilities) == nil { // otherwise none can be written
		finding := newFinding("spec-missing", f.CDIDir, "no CDI spec has this host's GPUs")
		if unit := f.failing(); unit != "" {
			finding = finding.fixed(whyItFails(unit))
		} else if nodes := checkNodes(f); len(nodes) > 0 {
			finding = finding.fixed(f.makeNodes() + " && " + finding.Fix)
		}
		list = append(list, finding)
	}
	for _, m := range s.mounts {
		switch {
		case m.readOnly:
			list = append(list, newFinding("dir-read-only", m.dir, "it is on a read-only file system").fixed(
				"name a directory that can be written to, with --"+m.option))
		case m.tmpfs && m.option == "state-dir":
			list = append(list, newFinding("state-tmpfs", m.dir, "it is on a tmpfs"))
		case m.tmpfs && s.hasOurs() && !s.renewed && !f.kubelet.present:
			list = append(list, newFinding("spec-volatile", m.dir, "our spec is on a tmpfs, and no service makes it at a boot"))
		}
	}
	return list
}

// checkUnreadable returns the finding about a file that engines cannot read. The file of another vendor may be needed.
func (f *facts) checkUnreadable(file *cdi.SpecFile) Finding {
	finding := newFinding("spec-unreadable", file.Path, file.Error)
	isDir := slices.Contains(f.specs.dirs.Dirs, file.Path)
	if isDir || f.isOwnSpec(file.Path) {
		finding.Fix = "rm " + wording.Quote(file.Path)
		if f.driver.devices != nil && len(f.driver.devices.Devices) > 0 {
			finding.Fix += " && gpu-cdi-plugin cdi generate --write"
		}
	}
	return finding
}

// hasOurs reports whether one of the specs is ours.
func (s *specFacts) hasOurs() bool {
	return slices.ContainsFunc(s.files, func(file specFile) bool { return file.ours })
}

// checkConflicts returns a finding for each pair of files that define the same names. It is about the file to remove.
func (f *facts) checkConflicts() []Finding {
	var list []Finding
	names := map[[2]string][]string{}
	var pairs [][2]string
	for _, d := range f.specs.dirs.Devices {
		if d.State != cdi.Conflicting || d.File > d.Other {
			continue
		}
		pair := [2]string{d.File, d.Other}
		if names[pair] == nil {
			pairs = append(pairs, pair)
		}
		names[pair] = append(names[pair], d.Name)
	}
	for _, pair := range pairs {
		file, other, fix := pair[0], pair[1], ""
		switch keeps, keepsOther := f.keeps(file), f.keeps(other); {
		case keeps && !keepsOther:
			file, other, fix = other, file, f.without(other)
		case keepsOther && !keeps:
			fix = f.without(file)
		}
		problem := fmt.Sprintf("it and %s define %s", other, wording.ShortenList(names[pair], 3, ", "))
		list = append(list, newFinding("spec-conflict", file, problem).fixed(fix))
	}
	return list
}

// keeps reports whether a spec file is the one that our service writes.
func (f *facts) keeps(file string) bool {
	return slices.ContainsFunc(f.specs.files, func(s specFile) bool { return s.path == file && s.ours }) &&
		f.isOwnSpec(file)
}

// isOwnSpec reports whether a path is that of the spec that our service writes.
func (f *facts) isOwnSpec(file string) bool {
	own := filepath.Join(f.CDIDir, cdi.FileName(f.CDIKind))
	return path.Base(file) == path.Base(own) && isSameDir(path.Dir(file), path.Dir(own))
}

// checkSpec returns findings about one spec. What differs from the host need not be listed as a problem too.
func (f *facts) checkSpec(s *specFile) []Finding {
	var list []Finding
	for _, p := range s.unsafe {
		list = append(list, newFinding("spec-unsafe", s.path, p.String()))
	}
	switch {
	case f.isShadowed(s.path): // engines do not use it
	case len(s.differences) > 0:
		list = append(list, newFinding("spec-stale", s.path, wording.ShortenList(s.differences, 3, "; ")).fixed(f.renew(s)))
	case len(s.problems) > 0:
		list = append(list, newFinding("spec-stale", s.path, wording.ShortenList(s.problems, 3, "; ")).fixed(f.renew(s)))
	}
	return list
}

// isShadowed reports whether files of a higher priority define all devices of a file.
func (f *facts) isShadowed(file string) bool {
	return !slices.ContainsFunc(f.specs.dirs.Devices, func(d cdi.Definition) bool {
		return d.File == file && d.State != cdi.Shadowed
	})
}

// renew returns the command that makes a spec again.
func (f *facts) renew(s *specFile) string {
	switch {
	case s.ours && len(checkNodes(f)) > 0:
		return f.makeNodes()
	case s.ours:
		return f.write(s.path)
	case f.program("nvidia-ctk") != "":
		return "nvidia-ctk cdi generate --output=" + wording.Quote(s.path)
	}
	return f.without(s.path) + " && gpu-cdi-plugin cdi generate --write"
}

// write returns the command that writes one of our specs again. The verb refuses to write names that another file
// defines, so such files are removed before.
func (f *facts) write(file string) string {
	fix := "gpu-cdi-plugin cdi generate --write"
	if !f.isOwnSpec(file) {
		fix = "gpu-cdi-plugin cdi generate --file " + wording.Quote(file)
	}
	i := slices.IndexFunc(f.specs.dirs.Files, func(s cdi.SpecFile) bool { return s.Path == file })
	seen := map[string]bool{}
	for _, c := range f.specs.dirs.Conflicts(file, f.specs.dirs.Files[i].Spec) {
		if !seen[c.File] {
			fix = f.without(c.File) + " && " + fix
		}
		seen[c.File] = true
	}
	return fix
}
