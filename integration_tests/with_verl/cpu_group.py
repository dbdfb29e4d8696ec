from with_verl import cpu_platform

cpu_platform.patch_process_group()
