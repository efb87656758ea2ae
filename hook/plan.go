package hook

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"unicode"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/ldcache"
)

// generator is what ldconfig -p says of a cache that the image did not have.
const generator = "prestart-hook of gpu-cdi-plugin"

// muslDefault is musl's search path where there is no file with another.
const muslDefault = "/lib:/usr/local/lib:/usr/lib"

// maxDir is in bytes, PATH_MAX less the NUL. maxMuslDirs bounds a search path, several times what real ones have.
const maxDir, maxMuslDirs = 4095, 100

// plan is what is to be changed in the root.
type plan struct {
	links []hookargs.Link
	// searches are the files by which loaders find libraries. A container without them may be of no use.
	searches []search
	// files are of less importance.
	files []file
	// masks are mounted over a file of the container.
	masks []file
	// notes are about what was found.
	notes []error
}

type file struct {
	path string
	data []byte
	mode fs.FileMode
}

// search is a file that makes a loader find the libraries.
type search struct {
	file
	libraries []hookargs.Library
	// config is written beside it, so that whoever makes the file anew in the container finds the libraries too. Its path
	// is empty where that is not needed.
	config file
	// isDefault reports whether the loader searches a directory also without the file. has reports whether a file is
	// in the root.
	isDefault func(dir string, has func(file string) bool) bool
}

// makePlan decides what to do. It is pure, and depends on the order of nothing but the arguments.
func makePlan(args *hookargs.CreateContainer, img *image, a arch) *plan {
	p := &plan{links: slices.Concat(args.Links, driLinks(args.DRI, img.nodes))}
	p.addCache(args.Links, img, a)
	p.addMusl(img, a)
	if data := eglProfile(img.minors); data != nil {
		p.files = append(p.files, file{profilePath, data, 0o444})
	}
	if data := maskParams(img.params); data != nil {
		p.masks = append(p.masks, file{paramsPath, data, 0o444})
	}
	return p
}

// addCache plans glibc's cache: the image's libraries, after the driver's. Without one, or with one that the loader
// ignores too, glibc searches its default directories for names that are not in it, so the driver's entries are enough.
func (p *plan) addCache(links []hookargs.Link, img *image, a arch) {
	exists := !isMissing(img.cache.err)
	if len(img.libraries) == 0 || !img.glibc && !exists {
		return
	}
	var entries []ldcache.Entry
	libs := slices.Concat(img.compat, img.libraries)
	for _, lib := range slices.Concat(libs, linkNames(links, libs)) {
		entries = append(entries, ldcache.Entry{Name: lib.SONAME, Path: lib.Path, Flags: a.flags})
	}
	cover := content{data: img.cache.cover}
	if data, _, err := mergeCache(cover, entries); err == nil && bytes.Equal(data, cover.data) {
		return
	}
	data, dropped, err := mergeCache(img.cache, entries)
	if err != nil {
		fresh := &ldcache.Cache{Generator: generator}
		fresh.Prepend(entries...)
		data = fresh.Marshal()
	}
	if err != nil && exists {
		p.notes = append(p.notes, fmt.Errorf("%w; a new one replaces it", err))
	}
	if dropped > 0 {
		p.notes = append(p.notes, fmt.Errorf("%s: left out %d entries without a name or an absolute path", cachePath, dropped))
	}
	s := search{file: file{cachePath, data, 0o644}, libraries: img.libraries, isDefault: isGlibcDefault}
	if len(img.configDirs) > 0 {
		s.config = file{configDir + "/" + configName, []byte(strings.Join(img.configDirs, "\n") + "\n"), 0o644}
	}
	p.searches = append(p.searches, s)
}

// linkNames are further names by which libraries are found through links beside them, as ldconfig has them in the cache:
// some programs load "libcuda.so". Of libraries with one SONAME the first is meant, as in the cache.
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

// mergeCache is the valid part of a cache with more entries, and how many entries were not valid. What it returns it
// also accepts: the next start reads it.
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

// isGlibcDefault goes by where libc itself is: its directory is always searched, and so is the same one with or without
// /usr in front. Which others are depends on the distribution's build of glibc.
func isGlibcDefault(dir string, has func(string) bool) bool {
	other, ok := strings.CutPrefix(dir, "/usr/")
	if ok {
		other = "/" + other
	} else {
		other = "/usr" + dir
	}
	return has(path.Join(dir, "libc.so.6")) || has(path.Join(other, "libc.so.6"))
}

// addMusl plans musl's search path, with the driver's directories last: they may hold glibc's libraries. musl finds
// libraries by file name, so each needs its SONAME as a link.
func (p *plan) addMusl(img *image, a arch) {
	if !img.musl || len(img.libraries) == 0 {
		return
	}
	p.addSONAMEs(img.libraries)
	if cover, _ := searchDirs(img.muslPath.cover); hasDirs(cover, img.libraries) {
		return
	}
	dirs, dropped := searchDirs(img.muslPath.data)
	err := img.muslPath.err
	if err != nil {
		dirs, _ = searchDirs([]byte(muslDefault))
	}
	if hasDirs(dirs, img.libraries) && (err == nil || isMissing(err)) {
		return
	}
	if err != nil && !isMissing(err) {
		p.notes = append(p.notes, fmt.Errorf("%w; a new one replaces it", err))
	}
	if dropped > 0 {
		p.notes = append(p.notes, fmt.Errorf("%s: left out %d parts that are no clean absolute path, or beyond the limit of %d",
			a.muslPath, dropped, maxMuslDirs))
	}
	for _, lib := range img.libraries {
		if dir := path.Dir(lib.Path); !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	data := []byte(strings.Join(dirs, "\n") + "\n")
	s := search{file: file{a.muslPath, data, 0o644}, libraries: img.libraries, isDefault: isMuslDefault}
	p.searches = append(p.searches, s)
}

// searchDirs are the directories of a search path, which has a colon or a newline between them, and the number of its
// parts that are no clean absolute path, or too many.
func searchDirs(data []byte) (dirs []string, dropped int) {
	for dir := range strings.FieldsFuncSeq(string(data), func(r rune) bool { return r == ':' || r == '\n' }) {
		clean := path.Clean(dir)
		isClean := path.IsAbs(dir) && (dir == clean || dir == clean+"/") && !strings.ContainsFunc(dir, unicode.IsControl)
		if !isClean || len(dir) > maxDir || len(dirs) == maxMuslDirs {
			dropped++
			continue
		}
		dirs = append(dirs, clean)
	}
	return dirs, dropped
}

// hasDirs reports whether the directories of all libraries are among dirs.
func hasDirs(dirs []string, libs []hookargs.Library) bool {
	for _, lib := range libs {
		if !slices.Contains(dirs, path.Dir(lib.Path)) {
			return false
		}
	}
	return true
}

func isMuslDefault(dir string, _ func(string) bool) bool {
	return slices.Contains(strings.Split(muslDefault, ":"), dir)
}

func (p *plan) addSONAMEs(libs []hookargs.Library) {
	planned := map[string]bool{}
	for _, l := range p.links {
		planned[l.Path] = true
	}
	for _, lib := range libs {
		dir, base := path.Split(lib.Path)
		if link := dir + lib.SONAME; base != lib.SONAME && !planned[link] {
			planned[link] = true
			p.links = append(p.links, hookargs.Link{Path: link, Target: base})
		}
	}
}
