package envoyconfigs
import ("testing";"os"; configv1 "tandem/protos/config/v1")
func TestTmp(t *testing.T){ c,_,err:=configv1.Load("/tmp/cfg/t.yaml"); if err!=nil{t.Fatal(err)}; b,err:=Bootstrap(c); if err!=nil{t.Fatal(err)}; os.WriteFile("/tmp/cfg/envoy.yaml",b,0o644)}
