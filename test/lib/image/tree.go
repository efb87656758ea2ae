package image

import (
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// Copy copies a tree of directories, files and links to dst, which must not exist.
func Copy(src, dst string) error {
	return filepath.WalkDir(src, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, path)
		if err != nil {
			return err
		}
		to := filepath.Join(dst, rel)
		switch {
		case d.IsDir():
			return os.Mkdir(to, 0o755)
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(target, to)
		case d.Type().IsRegular():
			return copyFile(path, to)
		}
		return fmt.Errorf("copy %s: a %s", path, d.Type())
	})
}

// copyFile copies a file or what a link points to, with its permissions.
func copyFile(src, dst string) (err error) {
	from, err := os.Open(src)
	if err != nil {
		return err
	}
	defer from.Close()
	info, err := from.Stat()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	to, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, info.Mode().Perm())
	if err != nil {
		return err
	}
	if _, err := io.Copy(to, from); err != nil {
		to.Close()
		return err
	}
	return to.Close()
}

// CopyFile copies a file, with its permissions, and makes the directories above the copy.
func CopyFile(t testing.TB, from, to string) {
	t.Helper()
	testenv.Must(t, copyFile(from, to))
}

// Digest describes every entry of a tree, by path: type, permissions, owner, and content, target or device number. Two
// trees with equal digests are identical except for times and inode numbers.
func Digest(t testing.TB, dir string) map[string]string {
	t.Helper()
	return digest(t, dir, func(fs.FileInfo, *syscall.Stat_t) string { return "" })
}

// Fingerprint returns a digest of a tree that includes modification times and inode numbers: it changes even if the
// same content is written again or a file is replaced by a copy.
func Fingerprint(t testing.TB, dir string) string {
	t.Helper()
	tree := digest(t, dir,
		func(i fs.FileInfo, st *syscall.Stat_t) string { return fmt.Sprint(" ", i.ModTime(), st.Ino) })
	h := sha256.New()
	for _, path := range slices.Sorted(maps.Keys(tree)) {
		fmt.Fprintln(h, path, tree[path])
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func digest(t testing.TB, dir string, more func(fs.FileInfo, *syscall.Stat_t) string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		tree[rel] = fmt.Sprintf("%v %d:%d device %#x%s", info.Mode(), st.Uid, st.Gid, st.Rdev, more(info, st))
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			tree[rel] += " -> " + target
			return err
		case info.Mode().IsRegular():
			tree[rel] += fmt.Sprintf(" %d bytes", info.Size())
			if info.Size() >= 1<<26 { // a sparse file of a malicious image
				return nil
			}
			data, err := os.ReadFile(path)
			tree[rel] += fmt.Sprintf(" %x", sha256.Sum256(data))
			return err
		}
		return nil
	})
	testenv.Must(t, err)
	return tree
}
