# containerd by ctr, and by crictl for the doctor, as docs/containerd.md has it for 1.7. gpu-cdi-runtime, which hook
# install makes for runtime handlers, stands in for runc.
image=docker.io/library/ubuntu:latest
export CONTAINER_RUNTIME_ENDPOINT=unix:///run/containerd/containerd.sock
start() {
	mkdir -p /etc/containerd
	cat >/etc/containerd/config.toml <<-END
		version = 2
		[plugins."io.containerd.grpc.v1.cri"]
		  enable_cdi = true
		  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
		  sandbox_image = "$image"
		  # Lowering a process' oom_score_adj needs CAP_SYS_RESOURCE.
		  restrict_oom_score_adj = true
	END
	containerd >/media/daemon.log 2>&1 &
	await $! ctr version && ctr images import /srv/ubuntu.tar && ctr --namespace k8s.io images import /srv/ubuntu.tar
}
none() { ctr run --rm $image none sh -c 'echo started'; }
case $(ctr --version) in
*" 1."*) ;; # reads no CDI specs
*)
	devices() {
		for name in 0 $uuid all; do ctr run --rm --device nvidia.com/gpu=$name $image "$name" nvidia-smi -L; done
	}
	lease() { leased ctr run --rm --device '{cdi}' $image lease nvidia-smi -L; }
	;;
esac
hook() {
	configure install containerd
	ctr run --rm --runc-binary /usr/libexec/gpu-cdi-plugin/gpu-cdi-runtime-containerd \
		--annotation cdi.k8s.io/a=nvidia.com/gpu=0 $image hook nvidia-smi -L
	configure uninstall
}
try() { doctor crictl; }
