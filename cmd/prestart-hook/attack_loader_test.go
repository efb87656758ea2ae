package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// loaderVariables have code or files of the image, LIB and DIR, in every variable by which glibc, musl and Go programs
// load or write files (ld.so(8), environ(7), runtime of Go). CVE-2025-23266 was LD_PRELOAD.
var loaderVariables = []string{
	"LD_PRELOAD=LIB", "LD_AUDIT=LIB", "LD_LIBRARY_PATH=DIR", "LD_ORIGIN_PATH=DIR", "LD_BIND_NOW=1", "LD_DEBUG=all",
	"LD_DEBUG_OUTPUT=DIR/debug", "LD_PROFILE=libc.so.6", "LD_PROFILE_OUTPUT=DIR", "LD_SHOW_AUXV=1", "LD_USE_LOAD_BIAS=1",
	"LD_HWCAP_MASK=0", "LD_ASSUME_KERNEL=2.2.5", "LD_DYNAMIC_WEAK=1", "LD_TRACE_LOADED_OBJECTS=1", "LD_VERBOSE=1",
	"GLIBC_TUNABLES=glibc.malloc.check=3:glibc.rtld.nns=" + strings.Repeat(
		"9",
		2000,
	), "GCONV_PATH=DIR", "GETCONF_DIR=DIR",
	"HOSTALIASES=DIR/hosts", "LOCALDOMAIN=x", "LOCPATH=DIR", "NLSPATH=DIR", "MALLOC_TRACE=DIR/trace", "MALLOC_CHECK_=3",
	"RESOLV_HOST_CONF=DIR/hosts", "RES_OPTIONS=debug", "NIS_PATH=DIR", "TZDIR=DIR", "TZ=:DIR/zone", "TMPDIR=DIR",
	"OPENSSL_CONF=DIR/ssl", "SSLKEYLOGFILE=DIR/keys", "ENV=DIR/env", "BASH_ENV=DIR/env", "SHELLOPTS=xtrace", "IFS=/",
	"PATH=DIR", "HOME=DIR", "XDG_CONFIG_HOME=DIR", "XDG_RUNTIME_DIR=DIR", "PYTHONPATH=DIR", "PERL5LIB=DIR",
	"GODEBUG=inittrace=1,netdns=cgo", "GOCOVERDIR=DIR", "GOTRACEBACK=crash", "GOMAXPROCS=1", "GOMEMLIMIT=1", "GOGC=1",
	"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all", "NVIDIA_CTK_DEBUG=true", "NODE=DIR",
	"DBUS_SYSTEM_BUS_ADDRESS=unix:path=DIR/bus", "NOTIFY_SOCKET=DIR/notify",
}

// makeExploit makes a library in the image that writes a file outside when a program loads it. It returns the
// variables that lead there from the working directory, and the path of that file.
func (a *attack) makeExploit() (env []string, marker string) {
	a.t.Helper()
	marker = filepath.Join(a.outside, "owned")
	testimage.Compile(a.t, a.path("/poc.so"), `#include <stdio.h>
		unsigned la_version(unsigned v) { return v; }
		__attribute__((constructor)) static void own(void) { FILE *f = fopen("`+marker+`", "w"); if (f) fclose(f); }`,
		"-shared", "-fPIC")
	paths := strings.NewReplacer("LIB", "/proc/self/cwd/poc.so", "DIR", "/proc/self/cwd")
	for _, v := range loaderVariables {
		env = append(env, paths.Replace(v))
	}
	return env, marker
}

// The hook runs with the image's environment in the image's directory, as runc runs hooks without an environment.
func TestAttackByTheEnvironment(t *testing.T) {
	for name, args := range map[string][]string{
		"createRuntime": {"create-runtime"}, "createContainer": workArgs, "precreate": {"precreate"}, "help": {"--help"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAttack(t)
			var marker string
			a.env, marker = a.makeExploit()
			a.own()
			a.start()
			for _, variable := range []string{"LD_PRELOAD", "LD_AUDIT"} {
				a.checkExploit(variable, marker)
			}
			before := a.host()
			image := testimage.Digest(t, a.root)
			state := a.state()
			command := append([]string{hookBinary(t)}, args...)
			switch name {
			case "createContainer":
				state = a.stateOf(1)
				command = append([]string{
					testenv.Command(t, "nsenter"), "--mount=" + a.proc("ns/mnt"), "--wdns=" + a.root,
					"/usr/bin/env", "-i",
				}, append(a.env, command...)...)
				a.env = []string{}
			case "precreate":
				state = `{"process": {"cwd": "/"}}`
			}
			a.bundle = a.root // the working directory
			if status, stderr := a.hook(strings.NewReader(state), command...); status != 0 ||
				strings.Contains(stderr, "prestart-hook") {
				t.Errorf("status %d: %s", status, stderr)
			}
			before.Check(t)
			after := testimage.Digest(t, a.root)
			for _, file := range []string{"debug", "trace", "keys", "libc.so.6.profile"} {
				if _, was := image[file]; !was && after[file] != "" {
					t.Errorf("the image got %s", file)
				}
			}
			if name == "createRuntime" {
				a.checkGiven()
			}
		})
	}
}

// checkExploit fails the test if the exploit does not work on a dynamically linked program.
func (a *attack) checkExploit(variable, marker string) {
	a.t.Helper()
	cmd := exec.Command("/bin/true")
	cmd.Dir, cmd.Env = a.root, []string{variable + "=/proc/self/cwd/poc.so"}
	_ = cmd.Run()
	if err := os.Remove(marker); err != nil {
		a.t.Fatalf("the exploit by %s does not work on a dynamic program: %v", variable, err)
	}
}

// With engines: the hook has no environment of its own, so runc passes that of the container to createContainer hooks.
func TestAttackByTheEnvironmentInEngines(t *testing.T) {
	for _, e := range engines(t) {
		for _, stage := range []string{"createRuntime", "createContainer"} {
			t.Run(stage+", "+e.name, func(t *testing.T) {
				b := newLiveBundle(t)
				marker := filepath.Join(b.dir, "owned")
				exploit := &attack{t: t, root: b.root, outside: b.dir}
				env, _ := exploit.makeExploit()
				config := b.config()
				config["process"].(map[string]any)["env"] = env
				hook := map[string]any{"path": hookBinary(t), "args": []string{"prestart-hook", "create-runtime"}}
				if stage == "createContainer" {
					hook["args"] = []string{"prestart-hook", "create-container", "--link=/etc/made::target"}
				}
				config["hooks"] = map[string]any{stage: []any{hook}}
				delete(config, "annotations")
				config["process"].(map[string]any)["args"] = []string{"/bin/busybox", "true"}
				b.write("config.json", config)
				_, stderr, err := e.run(t, b.dir, "")
				if err != nil {
					t.Errorf("%v: %s", err, stderr)
				}
				if _, err := os.Lstat(marker); err == nil {
					t.Error("the image's code was executed")
				}
				if _, err := os.Lstat(b.root + "/etc/made"); (err == nil) != (stage == "createContainer") {
					t.Errorf("the hook's link: %v", err)
				}
			})
		}
	}
}
