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

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/regular"
)

const notFound = "not found"

// findFiles finds the files of the table, each in the first of its directories that has it.
func findFiles(r root, m machine) ([]File, []Finding) {
	var files []File
	var findings []Finding
	for _, row := range fileTable {
		row.name = fill(row.name, "{machine}", m.name)
		f, note := row.find(r)
		findings = append(findings, Finding{
			Name: row.name, Kind: row.kind, Capabilities: row.capabilities,
			Path: f.HostPath, Used: note == "", Note: note,
		})
		if note == "" {
			files = append(files, f)
		}
	}
	return files, findings
}

// find returns the file, or a note on why there is none. A file that cannot be used is in the note unless a later
// directory has a better one.
func (row fileRow) find(r root) (File, string) {
	f, note := File{Kind: row.kind, Capabilities: row.capabilities}, notFound
	for _, dir := range row.dirs {
		at := under(dir, row.name)
		real, info, err := r.stat(at)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = row.check(r, at, info)
		}
		if err != nil {
			f.HostPath, note = real, err.Error()
			continue
		}
		f.Path, f.HostPath = at, real
		if row.target != "" {
			f.Path = under(row.target, row.name)
		}
		return f, ""
	}
	return f, note
}

func (row fileRow) check(r root, at string, info fs.FileInfo) error {
	switch {
	case row.name == mpsDir:
		return checkMPS(r, at)
	case row.kind == KindSocket && info.Mode().Type() != fs.ModeSocket,
		row.kind != KindSocket && !info.Mode().IsRegular():
		return fmt.Errorf("%s, not used", regular.TypeName(info.Mode()))
	case row.kind == KindBinary && info.Mode()&0o111 == 0:
		return errors.New("not executable")
	}
	return nil
}

// checkMPS returns an error unless the directory belongs to root. Every user of the host can make a directory or a link
// of that name in /tmp, and containers would get what it leads to, writable.
func checkMPS(r root, at string) error {
	info, err := os.Lstat(r.dir + at)
	if err != nil {
		return err
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); !ok || !info.IsDir() || stat.Uid != 0 {
		return errors.New("not a directory that belongs to root, not used")
	}
	return nil
}

// findFirmware finds the firmware of the driver's version in all directories that the kernel searches.
func findFirmware(h host.Host, r root, version string) ([]File, []Finding) {
	var files []File
	var findings []Finding
	for _, pattern := range firmwareNames {
		found := matches(r, pattern, firmwareDirsOf(h, version))
		if len(found) == 0 {
			name := path.Join("nvidia", version, pattern)
			findings = append(findings, Finding{Name: name, Kind: KindFirmware, Capabilities: All, Note: notFound})
		}
		for _, f := range found {
			files = append(files, f)
			findings = append(findings, Finding{
				Name: path.Base(f.Path), Kind: KindFirmware, Capabilities: All, Path: f.HostPath, Used: true,
			})
		}
	}
	return files, findings
}

// firmwareDirsOf are the directories with firmware of a version, in the order in which the kernel searches them.
func firmwareDirsOf(h host.Host, version string) []string {
	var dirs []string
	if data, err := regular.ReadFile(h.Sys("module/firmware_class/parameters/path"), 4096); err == nil {
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
		dirs = append(dirs, fill(dir, "{release}", release))
	}
	for i := range dirs {
		dirs[i] = path.Join(dirs[i], "nvidia", version)
	}
	return dirs
}

// matches are the regular files in the directories whose names match the pattern. A file that two directories lead to
// is one of the first.
func matches(r root, pattern string, dirs []string) []File {
	var files []File
	for _, dir := range dirs {
		_, names, err := r.names(dir)
		if err != nil {
			continue
		}
		for _, name := range names {
			if ok, _ := path.Match(pattern, name); !ok {
				continue
			}
			real, info, err := r.stat(under(dir, name))
			known := slices.ContainsFunc(files, func(f File) bool { return f.HostPath == real })
			if err != nil || !info.Mode().IsRegular() || known {
				continue
			}
			files = append(files, File{Path: under(dir, name), HostPath: real, Kind: KindFirmware, Capabilities: All})
		}
	}
	return files
}
