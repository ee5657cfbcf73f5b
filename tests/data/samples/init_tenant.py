# 引入模块
import os
from ems import Ems, EmsConfig, EmsException

# 通过环境变量获取access_id及access_key
access_id = os.getenv("access_id", None)
access_key = os.getenv("access_key", None)
# 初始化cc配置
cc_config = CcConfig(rank_id=8, device_id=0, model_id="llama2-13b")
# 初始化Ems
config = EmsConfig(access_id=access_id, access_key=access_key, cc_config=cc_config)
try:
    Ems.init(config)
except EmsException as e:
    print(f"exception: {e}.")
