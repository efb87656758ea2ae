package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
)

const notFound = "not found"

// addFiles adds the files of the table. Each file comes from the first of the directories that has it: those of the
// driver, then its own.
func (d *Driver) addFiles(r root, driverDirs []string) {
	for _, row := range fileTable {
		row.name = strings.ReplaceAll(row.name, "{machine}", host.MachineName())
		var places []place
		for _, dir := range slices.Concat(row.subdirs(driverDirs), row.dirs) {
			places = append(places, place{r, under(dir, row.name)})
		}
		finding := Finding{Name: row.name, Kind: row.kind, Capabilities: row.capabilities}
		f, finding := findFile(finding, places, row.check)
		d.Findings = append(d.Findings, finding)
		if finding.Used {
			if row.target != "" {
				f.Path = under(row.target, row.name)
			}
			d.Files = append(d.Files, f)
		}
	}
}

// subdirs returns the directories below those of a driver that may have the file.
func (row fileRow) subdirs(driverDirs []string) []string {
	var list []string
	for _, dir := range driverDirs {
		for _, sub := range dirSubdirs[row.kind] {
			if row.target != "" {
				list = append(list, under(dir, sub))
			}
		}
	}
	return list
}

// place is a path below a root.
type place struct {
	root root
	path string
}

// findFile finds a file at the first place where `check` accepts it, and completes the finding. If no place has a file
// that can be used, the note says why the file at an earlier place cannot.
func findFile(finding Finding, places []place, check func(place, fs.FileInfo) error) (File, Finding) {
	f := File{Kind: finding.Kind, Capabilities: finding.Capabilities}
	finding.Note = notFound
	for _, p := range places {
		real, info, err := p.root.stat(p.path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		finding.Path = real
		if err != nil {
			finding.Note = err.Error()
			continue
		}
		if err := check(p, info); err != nil {
			finding.Note = err.Error()
			continue
		}
		f.Path, f.HostPath = p.path, real
		finding.Used, finding.Note = true, ""
		return f, finding
	}
	return f, finding
}

func (row fileRow) check(at place, info fs.FileInfo) error {
	switch {
	case row.name == mpsDir:
		return checkMPS(at)
	case row.kind == KindSocket && info.Mode().Type() != fs.ModeSocket,
		row.kind != KindSocket && !info.Mode().IsRegular():
		return fmt.Errorf("%s, not used", fileio.TypeName(info.Mode()))
	case row.kind == KindBinary && info.Mode()&0o111 == 0:
		return errors.New("not executable")
	}
	return nil
}

// checkMPS returns an error unless the directory belongs to root. Every user of the host can make a directory or a
// link of that name in /tmp, and containers could then write to the directory or to the link's target.
func checkMPS(at place) error {
	info, err := os.Lstat(at.root.dir + at.path)
	if err != nil {
		return err
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); !ok || !info.IsDir() || stat.Uid != 0 {
		return errors.New("not a directory that belongs to root, not used")
	}
	return nil
}

// addFirmware adds the firmware of the driver's version from all directories that the kernel searches, and from those
// of the driver. If links lead to a file from two directories, it is added only once.
func (d *Driver) addFirmware(h host.Host, r root, driverDirs []string) {
	dirs, seen := firmwareDirsOf(h, d.Version), map[string]bool{}
	kernels := len(dirs)
	for _, dir := range driverDirs {
		for _, sub := range dirSubdirs[KindFirmware] {
			dirs = append(dirs, path.Join(under(dir, sub), "nvidia", d.Version))
		}
	}
	for _, pattern := range firmwareNames {
		before := len(d.Files)
		for i, dir := range dirs {
			target := dir
			if i >= kernels {
				target = path.Join("/lib/firmware/nvidia", d.Version)
			}
			_, names, _ := r.names(dir)
			for _, name := range names {
				isFirmware, _ := path.Match(pattern, name)
				real, info, err := r.stat(under(dir, name))
				if !isFirmware || err != nil || !info.Mode().IsRegular() || seen[real] {
					continue
				}
				seen[real] = true
				d.Files = append(d.Files,
					File{Path: under(target, name), HostPath: real, Kind: KindFirmware, Capabilities: All})
				d.Findings = append(d.Findings,
					Finding{Name: name, Kind: KindFirmware, Capabilities: All, Path: real, Used: true})
			}
		}
		if len(d.Files) == before {
			name := path.Join("nvidia", d.Version, pattern)
			d.Findings = append(d.Findings, Finding{Name: name, Kind: KindFirmware, Capabilities: All, Note: notFound})
		}
	}
}

// firmwareDirsOf returns the directories with firmware of a version, in the order in which the kernel searches them.
func firmwareDirsOf(h host.Host, version string) []string {
	var dirs []string
	if data, err := fileio.ReadFile(h.Sys("module/firmware_class/parameters/path"), 4096); err == nil {
		if custom := strings.TrimSpace(string(data)); path.IsAbs(custom) {
			dirs = append(dirs, custom)
		}
	}
	release := "unknown"
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		release = unix.ByteSliceToString(u.Release[:])
	}
	for _, dir := range firmwareDirs {
		dirs = append(dirs, strings.ReplaceAll(dir, "{release}", release))
	}
	for i := range dirs {
		dirs[i] = path.Join(dirs[i], "nvidia", version)
	}
	return dirs
}
