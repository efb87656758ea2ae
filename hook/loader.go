package hook

import (
	"bytes"
	"fmt"
	"path"
	"runtime"
	"slices"
	"strings"
	"unicode"

	"gpu-cdi-plugin/hook/rootfs"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/ldcache"
)

const (
	cachePath = "/etc/ld.so.cache"
	// generator is the generator's name in a cache for an image that had none; ldconfig -p prints the name.
	generator = "prestart-hook of gpu-cdi-plugin"
	// configDir has the files that configure ldconfig. ldconfig reads them in the order of their names, so the
	// directories in configName are searched first.
	configDir, configName = "/etc/ld.so.conf.d", "00-gpu-cdi-plugin.conf"
)

const (
	// muslDefault is musl's search path if there is no file with one.
	muslDefault = "/lib:/usr/local/lib:/usr/lib"

	maxMuslPath = 1 << 16 // bytes
	maxMuslDirs = 100     // several times what real search paths have
	maxDir      = 4095    // bytes; PATH_MAX without the NUL
)

const goarch = runtime.GOARCH

// arch has the constants of the two C libraries for a machine architecture.
type arch struct {
	// flags marks the architecture's libraries in glibc's cache.
	flags int32
	// glibcLoader and muslLoader are the paths that every dynamic program names as its interpreter.
	glibcLoader, muslLoader string
	// muslPath is the path of the file with musl's search path.
	muslPath string
}

func archFor(goarch string) (arch, error) {
	flags, ok := ldcache.FlagsFor(goarch)
	switch {
	case ok && goarch == "amd64":
		return arch{flags, "/lib64/ld-linux-x86-64.so.2", "/lib/ld-musl-x86_64.so.1", "/etc/ld-musl-x86_64.path"}, nil
	case ok && goarch == "arm64":
		return arch{flags, "/lib/ld-linux-aarch64.so.1", "/lib/ld-musl-aarch64.so.1", "/etc/ld-musl-aarch64.path"}, nil
	}
	return arch{}, fmt.Errorf("the architecture %s is not supported, only amd64 and arm64 are", goarch)
}

// loaderFile is a file by which a dynamic loader finds libraries.
type loaderFile struct {
	file
	libraries []hookargs.Library
	// defaultDirs are the directories that the loader searches without the file.
	defaultDirs []string
	// config is the ldconfig configuration that is written too, so that the libraries stay in the cache if the
	// container runs ldconfig. Its path is empty if no configuration is written.
	config file
}

// checkOptional returns an error if programs would not find a library without the file. Libraries in a subdirectory,
// such as vdpau/, are loaded by path and need not be found.
func (f loaderFile) checkOptional(root *rootfs.Root) error {
	var lost []string
	for _, lib := range f.libraries {
		dir := path.Dir(lib.Path)
		found := slices.Contains(f.defaultDirs, dir) && root.IsFile(path.Join(dir, lib.SONAME))
		if !found && !isSubdirectory(dir, f.libraries) {
			lost = append(lost, lib.SONAME)
		}
	}
	if len(lost) == 0 {
		return nil
	}
	names := lost[0]
	if len(lost) > 1 {
		names = fmt.Sprintf("%s and %d more libraries", lost[0], len(lost)-1)
	}
	return fmt.Errorf("no program in the container would find %s without %s: "+
		"use a writable root, or an image that has this file", names, f.path)
}

// isSubdirectory reports whether dir is below the directory of one of the libraries.
func isSubdirectory(dir string, libs []hookargs.Library) bool {
	return slices.ContainsFunc(libs, func(l hookargs.Library) bool {
		return strings.HasPrefix(dir, path.Dir(l.Path)+"/")
	})
}

// glibcDirs returns those of the libraries' directories that glibc searches by default: the directory of libc, with or
// without a leading /usr. Which other directories glibc searches depends on the distribution.
func glibcDirs(libs []hookargs.Library, isFile func(string) bool) []string {
	var dirs []string
	for _, dir := range dirsOf(libs) {
		other, ok := strings.CutPrefix(dir, "/usr/")
		if ok {
			other = "/" + other
		} else {
			other = "/usr" + dir
		}
		if isFile(path.Join(dir, "libc.so.6")) || isFile(path.Join(other, "libc.so.6")) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// dirsOf returns the directories of libraries, each once, in the order of the libraries.
func dirsOf(libs []hookargs.Library) []string {
	var dirs []string
	for _, lib := range libs {
		if dir := path.Dir(lib.Path); !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// addCache plans glibc's cache, with the driver's libraries before the image's. If the cache cannot be used, the new
// one has only the driver's libraries: glibc finds others in its default directories.
func (p *plan) addCache(links []hookargs.Link, seen *observation, a arch) {
	exists := !isMissing(seen.cache.err)
	if len(seen.libraries) == 0 || !seen.glibc && !exists {
		return
	}
	var entries []ldcache.Entry
	libs := slices.Concat(seen.compat, seen.libraries)
	for _, lib := range slices.Concat(libs, linkNames(links, libs)) {
		entries = append(entries, ldcache.Entry{Name: lib.SONAME, Path: lib.Path, Flags: a.flags})
	}
	cover := content{data: seen.cache.cover}
	if data, _, err := mergeCache(cover, entries); err == nil && bytes.Equal(data, cover.data) {
		return // the hook has mounted it already
	}
	data, dropped, err := mergeCache(seen.cache, entries)
	if err != nil {
		fresh := &ldcache.Cache{Generator: generator}
		fresh.Prepend(entries...)
		data = fresh.Marshal()
	}
	if err != nil && exists {
		p.warnings = append(p.warnings, replaced(err))
	}
	if dropped > 0 {
		p.warnings = append(p.warnings,
			fmt.Errorf("%s: dropped %d entries without a name or an absolute path", cachePath, dropped))
	}
	f := loaderFile{file: file{cachePath, data, 0o644}, libraries: seen.libraries, defaultDirs: seen.glibcDirs}
	if config := configOf(libs, seen); seen.hasConfigDir && config != "" {
		f.config = file{configDir + "/" + configName, []byte(config), 0o644}
	}
	p.loaderFiles = append(p.loaderFiles, f)
}

// configOf returns the configuration with which ldconfig finds the libraries: a line for each directory that glibc
// does not search by default.
func configOf(libs []hookargs.Library, seen *observation) string {
	var lines strings.Builder
	for _, dir := range dirsOf(libs) {
		if !isSubdirectory(dir, libs) && !slices.Contains(seen.glibcDirs, dir) {
			lines.WriteString(dir + "\n")
		}
	}
	return lines.String()
}

// replaced returns a warning that a file could not be used and was replaced.
func replaced(err error) error { return fmt.Errorf("%w; a new file replaces it", err) }

// linkNames returns the names of links to libraries, which ldconfig writes to the cache too, since some programs load
// "libcuda.so". If several libraries have one SONAME, a link to that SONAME is for the first of them.
func linkNames(links []hookargs.Link, libs []hookargs.Library) []hookargs.Library {
	first := map[string]string{}   // SONAME to file
	sonames := map[string]string{} // path of a library or of its SONAME's link, to SONAME
	for _, lib := range libs {
		if _, ok := first[lib.SONAME]; !ok {
			first[lib.SONAME] = lib.Path
		}
		sonames[lib.Path], sonames[path.Join(path.Dir(lib.Path), lib.SONAME)] = lib.SONAME, lib.SONAME
	}
	var named []hookargs.Library
	for _, l := range links {
		dir, base := path.Split(l.Path)
		soname, ok := sonames[path.Join(dir, l.Target)]
		if ok && base != soname && strings.HasPrefix(base, "lib") && !strings.Contains(l.Target, "/") {
			named = append(named, hookargs.Library{SONAME: base, Path: first[soname]})
		}
	}
	return named
}

// mergeCache adds entries to the valid entries of a cache, and counts the invalid entries, which it drops. It parses
// its own result, since the next run of the hook must be able to read it.
func mergeCache(now content, entries []ldcache.Entry) (data []byte, dropped int, err error) {
	if now.err != nil {
		return nil, 0, now.err
	}
	c, err := ldcache.Parse(now.data)
	if err != nil {
		return nil, 0, fmt.Errorf("%s: %w", cachePath, err)
	}
	dropped = c.DropInvalid()
	c.Prepend(entries...)
	data = c.Marshal()
	if _, err := ldcache.Parse(data); err != nil {
		return nil, 0, fmt.Errorf("%s: with the driver's libraries: %w", cachePath, err)
	}
	return data, dropped, nil
}

// addMusl plans musl's search path. The driver's directories come last, since they may hold glibc's libraries. musl
// finds libraries by file name, so each library needs a link with its SONAME.
func (p *plan) addMusl(seen *observation, a arch) {
	if !seen.musl || len(seen.libraries) == 0 {
		return
	}
	for _, lib := range seen.libraries {
		dir, base := path.Split(lib.Path)
		link := hookargs.Link{Path: dir + lib.SONAME, Target: base}
		planned := slices.ContainsFunc(p.links, func(l hookargs.Link) bool { return l.Path == link.Path })
		if base != lib.SONAME && !planned {
			p.links = append(p.links, link)
		}
	}
	if mounted, _ := searchDirs(seen.muslPath.cover); len(without(dirsOf(seen.libraries), mounted)) == 0 {
		return // the hook has mounted it already
	}
	dirs, dropped := searchDirs(seen.muslPath.data)
	err := seen.muslPath.err
	if err != nil {
		dirs, _ = searchDirs([]byte(muslDefault))
	}
	missing := without(dirsOf(seen.libraries), dirs)
	switch {
	case err != nil && !isMissing(err):
		p.warnings = append(p.warnings, replaced(err))
	case len(missing) == 0:
		return
	case dropped > 0:
		p.warnings = append(p.warnings,
			fmt.Errorf("%s: dropped %d parts that are not clean absolute paths, or beyond the limit of %d",
				a.muslPath, dropped, maxMuslDirs))
	}
	data := []byte(strings.Join(append(dirs, missing...), "\n") + "\n")
	p.loaderFiles = append(p.loaderFiles, loaderFile{
		file: file{a.muslPath, data, 0o644}, libraries: seen.libraries, defaultDirs: strings.Split(muslDefault, ":"),
	})
}

// without returns the strings that are in `list` but not in `other`.
func without(list, other []string) []string {
	return slices.DeleteFunc(list, func(s string) bool { return slices.Contains(other, s) })
}

// searchDirs splits a search path at colons and newlines. It drops parts that are not clean absolute paths, and parts
// beyond the limit, and counts both.
func searchDirs(data []byte) (dirs []string, dropped int) {
	for dir := range strings.FieldsFuncSeq(string(data), func(r rune) bool { return r == ':' || r == '\n' }) {
		clean := path.Clean(dir)
		isClean := path.IsAbs(dir) && (dir == clean || dir == clean+"/")
		if !isClean || strings.ContainsFunc(dir, unicode.IsControl) || len(dir) > maxDir || len(dirs) == maxMuslDirs {
			dropped++
			continue
		}
		dirs = append(dirs, clean)
	}
	return dirs, dropped
}
